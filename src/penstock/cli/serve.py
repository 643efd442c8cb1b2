"""`penstock serve`: binds the port, starts the model, answers until a signal. The work is in `build` and `serve`."""

from __future__ import annotations

from typing import Any

import click

from penstock.cli.options import EPILOG, GroupedCommand, config_from, config_options, model_argument


@click.command(cls=GroupedCommand, epilog=EPILOG)
@model_argument
@config_options("model", "kv", "scheduler", "backend", "server", "log")
def serve(**values: Any) -> None:
    """Answer HTTP requests for MODEL: the OpenAI API, until Ctrl-C or SIGTERM."""
    config = config_from(values)
    from penstock.cli.log import set_up_logging
    from penstock.cli.start import start_runtime
    from penstock.serve.server import bind_socket, run_server

    set_up_logging(config.log.log_format)
    with bind_socket(config.server.host, config.server.port) as listener:
        runtime = start_runtime(config)
        code = run_server(runtime, config.server, listener=listener)
    click.get_current_context().exit(code)
