"""The composition root: everything that brings routers and worker groups together.

app          `cluster.app:build`, the application builder that deployment files name
cli          the command `tandem`
config       the config tree: types, reading, legal values
deployment   files that say what runs, and on what: checked, changed
launch       a Ray cluster on this machine, started and stopped
running      a cluster that runs: where it is, what it says of itself
models       the model that comes with Tandem
scaling      how many groups a pool should have
plan         what fits on a machine, how fast it is, and a deployment that meets targets
simulate     a cluster in virtual time
bench        measuring this machine, the engine, and running servers
observe      dashboards checked, pushed to Grafana, drawn; a Prometheus on this machine
figures      what plan, simulate, bench and scaling share
ray          files for `ray up`
child        programs of this package as child processes
whole_file   files that are there whole or not at all
"""
