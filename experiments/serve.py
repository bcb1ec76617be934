"""`metagym serve`: a model behind the proxy, for programs that speak to OpenAI's or Anthropic's servers."""

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence

from metagym.errors import InputError
from metagym.protocols import Backend
from metagym.proxy.render import Renderer
from metagym.proxy.server import LOOPBACK, TRAINED, Proxy
from metagym.types import Sampling


def command(arguments: Sequence[str]) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit code."""
    parser = argparse.ArgumentParser(
        "metagym serve",
        description="Serves a model to programs and records every token. Prints a JSON line: where programs "
        "reach it, where sessions are opened, and the key for that.",
        epilog="Exit code 0: ended by a signal. 2: what was asked makes no sense.",
    )
    parser.add_argument(
        "--model", default="smollm2-135m", help='a name, a folder, or "random" for a tiny one'
    )
    parser.add_argument("--backend", choices=("embedded", "sglang"), default="embedded")
    parser.add_argument("--sglang-url", action="append", default=[], metavar="URL",
                        help="a running SGLang server; again for more. Without: it is started")  # fmt: skip
    parser.add_argument(
        "--sglang-router", default="", metavar="URL", help="an SGLang router in front of them"
    )
    parser.add_argument("--sglang-arg", action="append", default=[], metavar="FLAG",
                        help="a flag of a server that is started, such as --sglang-arg=--tp=2")  # fmt: skip
    parser.add_argument("--sglang-gpus", action="append", default=[], metavar="0,1",
                        help="start a server on these GPUs; again for more of them")  # fmt: skip
    parser.add_argument("--sglang-python", default="", metavar="PATH", help="an interpreter that has sglang")
    parser.add_argument(
        "--host", default="127.0.0.1", help="beyond the loopback only with METAGYM_CONTROL_KEY"
    )
    parser.add_argument("--port", type=int, default=8123, help="for programs; 0 takes a free one")
    parser.add_argument("--control-port", type=int, default=8124, help="for who opens and reads sessions")
    parser.add_argument("--socket", help="path of a unix socket for programs without a network")
    parser.add_argument("--context", type=int, default=8192, help="most tokens of prompt and reply together")
    parser.add_argument("--max-tokens", type=int, default=1024, help="most tokens of a reply")
    parser.add_argument("--slots", type=int, default=8, help="replies that are sampled at once (embedded)")
    parser.add_argument("--chat-template", help='"plain", a path, or jinja source; default: the model\'s own')
    parser.add_argument("--history", choices=("branch", "keep"), default="branch",
                        help="what a template that rewrites history does")  # fmt: skip
    parser.add_argument("--train-side", action="store_true", help="side requests, such as titles, train too")
    parser.add_argument("--temperature", type=float, help="for evaluation; without it sampling is training's")
    parser.add_argument("--open", metavar="NAME", help="open one session now, and print its address and key")
    options = parser.parse_args(arguments)
    if options.context < 2 or options.max_tokens < 1:
        raise InputError("--context must be at least 2, --max-tokens at least 1")
    if options.host not in LOOPBACK and not os.environ.get("METAGYM_CONTROL_KEY"):
        raise InputError(
            f"--host={options.host}, beyond this machine, needs a control_key: set METAGYM_CONTROL_KEY"
        )

    training = options.temperature is None
    sampling = Sampling(options.max_tokens, temperature=1.0 if training else options.temperature)
    backend, renderer = _backend(options)
    proxy = Proxy(
        backend,
        renderer,
        host=options.host,
        port=options.port,
        socket=options.socket,
        control_port=options.control_port,
        control_key=os.environ.get("METAGYM_CONTROL_KEY"),
        sampling=sampling,
        training=training,
        context=options.context,
        history=options.history,
        train=(*TRAINED, "side") if options.train_side else TRAINED,
    )
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    try:
        proxy.start()
        told = {
            "url": proxy.url,
            "socket": proxy.socket,
            "control_url": proxy.control_url,
            "control_key": proxy.control_key,
            "template": proxy.contract,
        }
        if options.open is not None:
            opened = proxy.open(options.open)
            told["session"] = {"id": opened.id, "url": opened.url, "key": opened.key}
        print(json.dumps(told), flush=True)
        ended.wait()
    finally:
        proxy.close()
        backend.close()
    return 0


def _backend(options: argparse.Namespace) -> tuple[Backend, Renderer]:
    import tempfile
    from pathlib import Path

    from metagym.experiments.build import random_model, sglang_servers
    from metagym.models import ModelError, load, resolve
    from metagym.proxy.backends.embedded import EmbeddedBackend
    from metagym.proxy.backends.sglang import SGLangBackend

    if options.backend == "sglang":
        try:
            directory = resolve(options.model)
        except ModelError as error:
            raise InputError(f"--backend=sglang --model={options.model}: {error}") from error
        renderer = Renderer.from_dir(directory, options.chat_template)
        urls, gpus = options.sglang_url, options.sglang_gpus
        logs = Path(tempfile.mkdtemp(prefix="metagym-serve-"))
        if not urls:
            print(f"starting SGLang; its output goes to {logs}", file=sys.stderr, flush=True)
        servers = urls or sglang_servers(
            directory, logs, max(1, len(gpus)), options.sglang_arg, gpus, options.sglang_python
        )
        router, context = options.sglang_router, options.context
        return SGLangBackend(servers, directory, router=router, context=context), renderer
    try:
        if options.model == "random":
            directory = random_model(Path(tempfile.mkdtemp(prefix="metagym-serve-")), 0)
            model, _ = load(str(directory))
        else:
            model, directory = load(options.model)
    except (ModelError, FileNotFoundError) as error:
        raise InputError(f"--model={options.model}: {error}") from error
    renderer = Renderer.from_dir(directory, options.chat_template)
    backend = EmbeddedBackend(model, slots=options.slots, context=options.context)
    print(f"compiling for {options.slots} slots of {options.context} tokens", file=sys.stderr, flush=True)
    backend.warm_up()
    return backend, renderer
