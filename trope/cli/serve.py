"""The command `trope serve`: a run behind HTTP."""

from __future__ import annotations

import gc
import ipaddress
import os
import socket
import sys
import webbrowser
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

_EXPERIMENT = "An experiment"


def serve(
    run: Annotated[
        str | None,
        typer.Argument(help="A run made by `trope train`, `trope fit` or `trope update`, or hf://owner/name."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="The dataset with the users' histories; else the run's own.")
    ] = None,
    store: Annotated[str | None, typer.Option(help="Where events are kept: a file, or redis://….")] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on; another than loopback needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="The port to listen on; 0 takes a free one.")] = 8000,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with API keys, one a line.")] = None,
    no_key: Annotated[bool, typer.Option("--no-key", help="Let everybody in who can reach this address.")] = False,
    rate: Annotated[float | None, typer.Option(min=0, help="Requests a second for each client; 0: no limit.")] = None,
    compare: Annotated[str | None, typer.Option(help="A second run, which the page shows beside the first.")] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Serve a new model as soon as it is in RUN.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", help="Log failures only, not every request.")] = False,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=RUN:SHARE, instead of RUN; two or more, the first is the control.", rich_help_panel=_EXPERIMENT
        ),
    ] = None,
    experiment: Annotated[
        str | None, typer.Option(help="Name of the experiment; users are assigned by it.", rich_help_panel=_EXPERIMENT)
    ] = None,
    exposures: Annotated[
        Path | None,
        typer.Option(help="Folder of what was shown. Default: exposures/EXPERIMENT.", rich_help_panel=_EXPERIMENT),
    ] = None,
    allow_override: Annotated[
        bool,
        typer.Option(
            "--allow-override", help="Let a question name its arm; it is logged as forced.", rich_help_panel=_EXPERIMENT
        ),
    ] = False,
) -> None:
    """Answer recommendations over HTTP, from a run's model and the events that come in.

    An event is acknowledged when it is on disk, and every later answer knows it. A page in the browser shows what is
    recommended over the year. With --arm, users are split between several runs and every list is logged: an A/B test.
    See docs/serving.md.
    """
    import torch
    import uvicorn

    from trope.server.app import Options
    from trope.server.gate import LOOPBACK
    from trope.server.limits import Limits
    from trope.server.logs import Log
    from trope.server.start import start
    from trope.server.start_trial import open_trial, runs_of

    runs = runs_of(run, arm or [], experiment, exposures, allow_override)
    run = next(iter(runs.values())).run
    keys, is_local = _keys(api_key_file), _is_loopback(host)
    if not is_local and not keys and not no_key:
        raise ValueError(
            f"--host {host} can be reached from other machines; give --api-key-file, or say --no-key if that is meant"
        )
    # One core is for HTTP. Small models gain nothing from more threads than there are cores left.
    torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
    # The worker gives the interpreter up at every operation of torch, and would get it back after 5 ms each time.
    sys.setswitchinterval(0.0005)
    # A batch makes thousands of objects, none of them in cycles: looking for cycles after every 700 costs more than
    # some of its steps.
    gc.set_threshold(20_000, 20, 20)
    limits, log = Limits(), Log(requests=not quiet)
    listening = _listen(host, port)
    options = Options(
        data=data, device=device, keys=keys, rate=(0.0 if is_local else 200.0) if rate is None else rate,
        hosts=(*LOOPBACK, host.lower()) if is_local and not keys else (),
        watch=Path(run) if watch and experiment is None else None, limits=limits,
    )  # fmt: skip
    begin = None
    if experiment is not None:
        begin = partial(open_trial, experiment, exposures, runs, may_override=allow_override, watch=watch)
    started = start(runs, compare, _store_of(run, store), options, log, begin)
    settings = uvicorn.Config(
        started.app, log_config=None, access_log=False,
        server_header=False, timeout_graceful_shutdown=30, timeout_keep_alive=30, ws="none",
        # A header that any client can send must not say who the client is: the rate is counted by address.
        proxy_headers=False,
    )  # fmt: skip
    address, found_port = listening.getsockname()[:2]
    where = f"http://{f'[{address}]' if ':' in address else address}:{found_port}"
    log.say("serving", address=where, model=started.version, users=started.users, store=started.store)
    if started.arms is not None:
        log.say("experiment", name=experiment, arms=started.arms, exposures=str(started.exposures))
        typer.echo(f"trope: experiment {experiment}: {started.arms}; exposures in {started.exposures}", err=True)
    typer.echo(f"trope: serving {started.version} at {where}", err=True)
    typer.echo(f"trope: see {where}/ in a browser", err=True)
    if open_page:
        listening.listen()  # a browser that is faster than we are waits in the socket's queue
        webbrowser.open(f"{where}/")
    gc.collect()
    gc.freeze()  # what was loaded stays, and need not be looked at again
    uvicorn.Server(settings).run(sockets=[listening])


def _keys(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    keys = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    if not keys or min(map(len, keys)) < 16:
        raise ValueError(f"{path} must hold API keys of at least 16 characters, one a line")
    return keys


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _store_of(run: str, store: str | None) -> str | Path:
    from trope.models.pretrained import HUB, read_config
    from trope.runs import BEST, SERVED_EVENTS

    if store is not None:
        return store
    if run.startswith(HUB):
        raise ValueError("a model of the hub has no folder for events; say where to keep them with --store")
    if not Path(run).is_dir():
        raise FileNotFoundError(f"there is no folder {run}; give a run made by `trope train`")
    if Path(run).is_symlink():
        beside = Path(run).parent / SERVED_EVENTS
        raise ValueError(
            f"{run} is a link: events in its folder would stay behind when it moves; say where to keep them, such as "
            f"--store {beside}"
        )
    best = Path(run) / BEST
    read_config(best if best.is_dir() else Path(run))  # no file for events is left in a folder without a model
    return Path(run) / SERVED_EVENTS


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket, before the model is loaded: a port that is taken is said at once, in one line."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise OSError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another --port"
        ) from None
    return listening
