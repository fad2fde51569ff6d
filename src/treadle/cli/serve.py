"""`treadle serve`."""

from __future__ import annotations

import argparse
import asyncio
import gc
import secrets
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.cli.options import Commands, add_command
from treadle.core.errors import ConfigError

if TYPE_CHECKING:
    from treadle.core.engine import Engine
    from treadle.rollout.gateway.gateway import Gateway
    from treadle.rollout.session import Session

_EXAMPLES = """examples:
  treadle serve runs/demo/checkpoints/step-000040
  treadle serve models/warm --port 9000 --temperature 0.7 --parser hermes
  treadle serve models/warm --record recorded

Then, with the base URL and the key that it prints:
  curl $URL/chat/completions -H "Authorization: Bearer $KEY" \\
    -d '{"messages": [{"role": "user", "content": "Where does Anna live?"}]}'

It speaks OpenAI's chat completions, completions and responses and Anthropic's messages (docs/gateway.md) and keeps
every call in memory: it is meant for trying models and agents out, not for serving the public. Ctrl-C ends it.
"""


def add_parser(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "serve", run, "serve a model to OpenAI's and Anthropic's clients", _EXAMPLES)
    parser.add_argument("model", metavar="MODEL_DIR", type=Path, help="directory of a Hugging Face causal LM")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one (default: 8000)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of requests that name none (default: 1)")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of replies that name no limit (default: 1024)")
    parser.add_argument("--parser", default="auto", help="how replies are read: a registered name or module:function")
    parser.add_argument("--record", type=Path, metavar="DIR", help="write the recorded steps there at the end")


def run(options: argparse.Namespace) -> int:
    """Serve until interrupted; 0 then."""
    if not (options.model / "config.json").is_file():
        raise ConfigError(f"no config.json in {str(options.model)!r}; give the directory of a Hugging Face causal LM")
    if options.record is not None and options.record.exists() and not options.record.is_dir():
        raise ConfigError(f"--record {options.record}: is no directory")

    from treadle.rollout.gateway.gateway import Gateway

    make = _loaded(options)
    gc.freeze()  # the libraries stay: searching them for garbage would halt every request for some 200 ms
    asyncio.run(_serve(options, make, Gateway(model=options.model.name)))
    return 0


def _loaded(options: argparse.Namespace) -> Callable[[], tuple[Engine, Session]]:
    """Load the model; what makes its engine and the session wants a running event loop."""
    from treadle.core.draws import Stream
    from treadle.core.types import SamplingParams
    from treadle.engines.torch_engine import TorchEngine
    from treadle.orchestration.policy import load_policy
    from treadle.rollout.replies import reply_parser
    from treadle.rollout.session import Address, Session
    from treadle.training.config import ModelConfig
    from treadle.training.model import load_tokenizer

    policy = load_policy(ModelConfig(path=str(options.model)), seed=0)
    parse = reply_parser(options.parser, str(load_tokenizer(policy.tokenizer_path).chat_template))
    sampling = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
    address = Address(secrets.randbits(47), Stream.SERVE, 0, 0, 0)

    def make() -> tuple[Engine, Session]:
        engine = TorchEngine(policy.model, stop_token_ids=policy.stop_token_ids, decode=policy.decode)
        session = Session(
            "serve",
            engine,
            policy.renderer,
            sampling,
            policy.context - 1,
            address,
            parse,
            callers_sampling=True,
            context=policy.context,
        )
        return engine, session

    return make


async def _serve(options: argparse.Namespace, make: Callable[[], tuple[Engine, Session]], gateway: Gateway) -> None:
    from treadle.rollout.gateway.serving import serving

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    engine, session = make()
    try:
        async with serving(gateway, options.host, options.port) as url:
            address = gateway.attach(session)
            print(f"serving {options.model}; Ctrl-C ends it")
            print(f"base URL  {url}/v1 (for Anthropic's clients: {url})")
            print(f"API key   {address.secret}", flush=True)
            await stop.wait()
        if options.record is not None and session.steps:
            print(f"steps: {len(session.steps)}, in {_write(options.record, session)}")
    finally:
        session.close()
        await engine.close()


def _write(directory: Path, session: Session) -> Path:
    """All steps as one trajectory, in a shard of its own."""
    from treadle.core.types import Group, Status, Task, Trajectory
    from treadle.orchestration.rollout_store import write_shard

    directory.mkdir(parents=True, exist_ok=True)
    number = len(list(directory.glob("serve-*.parquet")))
    name = f"serve-{number:06d}"
    trajectory = Trajectory(f"{name}.0", "serve", 0, tuple(session.steps), 0.0, Status.DONE)
    return directory / write_shard(directory, name, [Group(name, number, 0, 0, Task("serve"), (trajectory,))])
