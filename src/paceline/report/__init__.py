"""Reports on finished runs: one data model, rendered as report.html, report.md and report.json."""
