"""Commands about the engine hooks."""

from __future__ import annotations

import click

from tierd.cli.base import cli, json_option, print_json

# Engine -> the module whose run() returns its findings.
CHECKS = {
    "sglang": "tierd.hook.sglang.check",
    "transformers": "tierd.hook.check",
    "vllm": "tierd.hook.vllm.check",
}


@cli.group()
def hook() -> None:
    """Look at the engine hooks."""


@hook.command()
@click.argument("engine", type=click.Choice(sorted(CHECKS)))
@json_option
def check(engine: str, as_json: bool) -> None:
    """Check that ENGINE, as installed here, can be served; it is not started.

    Run it by the engine's Python: PYTHON -m tierd.cli hook check ENGINE
    """
    import dataclasses
    import importlib

    findings = importlib.import_module(CHECKS[engine]).run()
    problems = sum(finding.problem is not None for finding in findings)
    if as_json:
        print_json({"engine": engine, "findings": [dataclasses.asdict(f) for f in findings]})
    else:
        for finding in findings:
            verdict = "ok" if finding.problem is None else "REFUSED"
            click.echo(f"{verdict:8} {finding.what}: {finding.problem or finding.detail}")
        click.echo(f"{engine}: {'can be served' if not problems else f'{problems} refused'}")
    if problems:
        raise click.exceptions.Exit(1)
