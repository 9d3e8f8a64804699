"""The commands of `tandem`: one file a group of them; everything they need comes in as `Services`."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from cluster.cli import bench, dashboards, metrics, model
from cluster.cli.chat import chat
from cluster.cli.deploy import deploy, down, validate
from cluster.cli.explain import explain
from cluster.cli.plan import plan
from cluster.cli.scale import scale
from cluster.cli.serve import serve
from cluster.cli.simulate import simulate_command
from cluster.cli.status import status
from cluster.cli.terminal import Terminal
from cluster.cli.version import version


class Commands(TyperGroup):
    """All of them; what the parser refuses is a document, too, where `--json` asks for one."""

    def invoke(self, ctx: Any) -> Any:
        is_json = "--json" in ctx.args  # behind the command's name
        try:
            return super().invoke(ctx)
        except TyperException as error:
            if not is_json:
                raise
            raise Terminal(as_json=True).fail(error.format_message(), code=error.exit_code) from error


app = typer.Typer(
    name="tandem",
    cls=Commands,
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
