"""Tables and plots of finished runs: one model, rendered as report.html, report.md and report.json."""
