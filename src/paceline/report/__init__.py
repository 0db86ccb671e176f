"""Tables and plots of finished runs: report.json holds every number, report.md and report.html show them."""
