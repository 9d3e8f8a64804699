"""What is done with the pages of `dashboards`: check them, push them to Grafana, draw them from a Prometheus;
and a Prometheus on this machine."""
