"""The commands of `tandem`: one file a group of them; everything they need comes in as `Services`."""

from __future__ import annotations

import typer

from cluster.cli import bench, dashboards, metrics, model
from cluster.cli.chat import chat
from cluster.cli.deploy import deploy, down, validate
from cluster.cli.explain import explain
from cluster.cli.plan import plan
from cluster.cli.scale import scale
from cluster.cli.serve import serve
from cluster.cli.simulate import simulate_command
from cluster.cli.status import status
from cluster.cli.version import version

app = typer.Typer(
    name="tandem",
    help="Serve language models on Ray: prefix-aware routing, tensor-parallel groups, paged KV.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (serve, deploy, scale, status, explain, down, chat, validate, plan, version):
    app.command()(command)
app.command("simulate")(simulate_command)
app.add_typer(model.app, name="model")
app.add_typer(bench.app, name="bench")
app.add_typer(dashboards.app, name="dashboards")
app.add_typer(metrics.app, name="metrics")
