"""Grafana pages, alert rules and scrape configs as Python; `files/` has them built."""
