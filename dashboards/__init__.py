"""Grafana dashboards as Python: `python -m dashboards` writes the JSON files beside this one."""
