"""`treadle-retrieve`: a retrieval server for search agents."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from treadle.cli.commands import Parser, add_address
from treadle.cli.console import Console
from treadle.cli.options import address_of, exit_status
from treadle.core.errors import ConfigError
from treadle.rollout.config import listen, url_of

_EXAMPLES = """examples:
  treadle-retrieve corpus.jsonl                                    BM25, no model needed
  treadle-retrieve corpus.jsonl --model e5-base-v2                 dense: embeds the corpus first, once
  treadle-retrieve wiki-18.jsonl --index e5_Flat.index --model e5-base-v2      with the published index

  curl 127.0.0.1:8000/retrieve -H 'Content-Type: application/json' \\
    -d '{"queries": ["where is Acme Motors?"], "topk": 3, "return_scores": true}'

A corpus is JSON lines: {"id": "0", "contents": "title\\ntext"}. Indexes are built once and kept in Treadle's cache. The
server has no password: keep it on loopback or in a private network. Press Ctrl-C to stop.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_status(_run, _parse(arguments), "treadle-retrieve")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="treadle-retrieve",
        description="Serve passages of a corpus to search agents, by the protocol of Search-R1's retrieval server.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("corpus", metavar="CORPUS", type=Path, help="JSON lines, each with its text in `contents`")
    parser.add_argument("--model", type=Path, metavar="DIR", help="sentence-embedding model (default: none, BM25)")
    parser.add_argument("--index", type=Path, metavar="FILE", help="existing FAISS index of the corpus's vectors")
    parser.add_argument("--topk", type=int, default=3, help="default passages per query (default: 3)")
    add_address(parser, 8000)
    parser.add_argument(
        "--most-waiting", type=int, default=4096, help="queries that may wait before others get a 503 (default: 4096)"
    )
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds until a request gets a 503 (default: 20)")
    parser.add_argument("--build-only", action="store_true", help="build the index, and serve nothing")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> int:
    for name in ("topk", "most_waiting", "timeout"):
        if not (value := getattr(options, name)) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be above 0")
    address = address_of(options, "treadle-retrieve")
    from treadle.retrieval.index import open_corpus  # bm25s

    console = Console()
    with nullcontext() if options.build_only else listen(address, "--{} {}") as listening:  # before an index is built
        tenths: dict[str, int] = {}

        def show(what: str, done: int, total: int) -> None:
            if tenths.setdefault(what, 0) < (tenth := 10 * done // max(total, 1)):
                tenths[what] = tenth
                console.line(f"{what}: {done:,} of {total:,}")
                sys.stdout.flush()

        corpus = open_corpus(options.corpus, options.model, options.index, show)
        if listening is None:
            console.line(f"{len(corpus.passages):,} passages, indexed")
            return 0
        import uvicorn

        from treadle.retrieval.server import RetrievalQueue, make_app  # FastAPI

        queue = RetrievalQueue(corpus.passages, corpus.retriever, options.most_waiting, options.timeout)
        app = make_app(queue, options.topk)
        # A client returns once its model has written the next query.
        config = uvicorn.Config(app, log_config=None, access_log=False, ws="none", timeout_keep_alive=60)
        with suppress(KeyboardInterrupt):
            console.line(f"{len(corpus.passages):,} passages of {options.corpus}; press Ctrl-C to stop")
            console.line(f"url  {url_of(listening)}/retrieve")
            sys.stdout.flush()
            uvicorn.Server(config).run(sockets=[listening])
    return 0


if __name__ == "__main__":
    sys.exit(main())
