"""The `tritonemb` command: parse the command line, run the command, report errors in one line."""

import argparse
import contextlib
import errno
import functools
import importlib
import inspect
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from tritonemb import __version__
from tritonemb.utils import MissingExtraError, did_you_mean, end_with_torchrun, require

USAGE = """\
usage: tritonemb COMMAND ...

Train recommendation models.

  train             train a click model and report its test metrics
  predict           write the click probability of every row of a log
  evaluate          print the metrics of a run on labeled rows
  export            export a run for serving: mapped tables, ATen or ONNX
  serve             serve the scores of a run over HTTP
  compare           compare options, metrics and curves of runs
  vocab             build a vocabulary: number categories by frequency
  convert           convert a text log to Parquet files
  reader            run a reader host: read a log for remote trainers
  embedding-server  run an embedding server: hold table rows for trainers
  plan              plan the sharding of tables on a cluster, with reasons
  calibrate         measure this machine for the planner
  doctor            print versions, devices and kernels, and check them

Each command has its own --help. To try it on data that needs no download:

  tritonemb train --data synthetic
"""

TRAIN_USAGE = """\
usage: tritonemb train [--data NAME|PATH] [--config FILE] [--resume auto] ...

Train a click model; print test AUC, log loss, normalized entropy, samples/s.

  --data NAME|PATH      a log, a file or folder; or movielens-100k, adult,
                        synthetic, criteo-kaggle, criteo-terabyte (and --path)
  --label COLUMN        of a log, 0 or 1; --dense COLUMN ... for numbers,
  --sparse COLUMN ...   for categories; --time-column COLUMN --test-from TIME
                        holds out rows, else the last sixth; --labels, --weight
  --preset NAME         start from the preset of another data set
  --config FILE         a TOML file; flags take precedence
  --resume auto|PATH    resume from the newest, or from this, checkpoint
  --out FOLDER          folder of checkpoints, log and report
  --model NAME          dlrm, dcnv2, deepfm, finalmlp, din, two_tower, mmoe, ple
                        or MODULE:FUNCTION; and --embedding-dim, --top-mlp
  --epochs N            or --max-steps N; --batch-size N; --accumulate N
  --embedding-lr X      and --embedding-optimizer, --cow-clip X; --dense-lr X
  --dense-decay cosine  and --table-decay, --dense-warmup-steps N, ...
  --evaluate-every N    steps; --patience N stops without improvement
  --checkpoint-steps N  or --checkpoint-minutes X; --keep N; --publish FOLDER
  --on-bad-row skip     skip and count malformed rows; --transforms MODULE:FUNCTION ...
  --precision bf16      autocast; --compile runs torch.compile; --tensorboard
  --device cuda         --threads N on a CPU; --seed N; --profile-steps N
  --num-workers N       data loader workers per rank; --parser-threads N
  --plan FILE           sharding plan for the ranks that torchrun starts
  --offload-states disk of the dense optimizer, with --offload-path FOLDER;
                        --offload-params, --offload-grads, --offload-activations
  --servers N           tables on embedding servers; or ray:N, or HOST:PORT,...; --staleness S
  --help-all            every option, with its default

  tritonemb train --data day_0.tsv --epochs 1 --out runs/first --resume auto
"""

RENAMED_COMMANDS = {"server": "embedding-server"}
RENAMED_OPTIONS = {"--workers": "--parser-threads"}

# OSErrors that are user errors, besides EROFS; a ValueError always is.
USER_ERRORS = (FileNotFoundError, FileExistsError, NotADirectoryError, ConnectionError, PermissionError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 2 for a user error, reported in one line on stderr."""
    end_with_torchrun()  # first, as imports take time
    name, *command_arguments = list(sys.argv[1:] if arguments is None else arguments) or [""]
    if name in ("", "-h", "--help"):
        print(USAGE, end="", file=sys.stdout if name else sys.stderr)
        return 0 if name else 2
    if name == "--version":
        print(f"tritonemb {__version__}")
        return 0
    if "torch" not in sys.modules:  # waiting OpenMP threads would spin, and take cores from others
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if (folder := os.getcwd()) not in sys.path:  # modules that options name; last, so that it hides no package
        sys.path.append(folder)
    # Run the command; errors become one line and a status.
    try:
        if name not in COMMANDS:
            hint = did_you_mean(name, COMMANDS, f"; there are {', '.join(COMMANDS)}")
            hint = f"; it is now {RENAMED_COMMANDS[name]!r}" if name in RENAMED_COMMANDS else hint
            raise ValueError(f"unknown command {name!r}{hint}")
        return COMMANDS[name](command_arguments)
    except BrokenPipeError:  # the reader of the output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, MissingExtraError) as error:
        print(f"error: {error}", file=sys.stderr)
        causes = (error, error.__cause__)
        is_user_error = any(isinstance(c, USER_ERRORS) or getattr(c, "errno", None) == errno.EROFS for c in causes)
        return _end(1 if isinstance(error, OSError) and not is_user_error else 2)
    except KeyboardInterrupt:
        return _end(130)
    except Exception as error:
        if not _in_a_job():
            raise
        from tritonemb.comm.group import RankFailed

        if isinstance(error, RankFailed):  # no traceback: the error is of another rank
            print(f"error: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        return _end(1)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def _in_a_job() -> bool:
    # torch.distributed may be partially imported.
    return bool(getattr(sys.modules.get("torch.distributed"), "is_initialized", bool)())


def _end(status: int) -> int:
    """Exit at once in a job of several ranks, where threads may wait for dead ranks; else return the status."""
    if _in_a_job():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _train(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(TRAIN_USAGE, end="")
        return 0
    require("tyro")
    from tritonemb.training.config import TrainConfig, preset
    from tritonemb.training.job import train
    from tritonemb.training.ranks import Interrupted
    from tritonemb.training.toml import from_plain, load_toml

    # Data set, preset and file determine the defaults, so parse these options before the others.
    parser = _Parser(prog="tritonemb train", add_help=False, allow_abbrev=False)
    for flag in ("--data", "--preset", "--config", "--resume"):
        parser.add_argument(flag)
    known, remaining = parser.parse_known_args(arguments)
    toml_values = load_toml(known.config) if known.config else {}
    defaults = preset(str(known.data or toml_values.get("data") or TrainConfig.data), known.preset)
    defaults = from_plain(toml_values | ({"data": known.data} if known.data else {}), defaults, str(known.config))
    try:
        config = _parse(TrainConfig, remaining, "tritonemb train", default=defaults)
        options, publishers = config.publish, []
        if options.publish is not None:
            from tritonemb.serving.publisher import Publisher

            values = {name: getattr(options, f"publish_{name}") for name in ("steps", "rows", "seconds", "priority")}
            publishers = [Publisher(options.publish, **values)]
        train(config, known.resume, publishers)
    except Interrupted as interruption:
        print(f"{interruption}; resume with --resume auto", file=sys.stderr)
        return interruption.exit_status
    return 0


def _run(name: str, arguments: list[str]) -> int:
    if name == "serve" and any(word.startswith(("--data", "--peers")) for word in arguments):
        raise ValueError("serve serves the scores of a run; to read a log for trainers: tritonemb reader")
    module_name, class_name, function = _SIMPLE[name]
    module = importlib.import_module(module_name)
    options_class = getattr(module, class_name)
    if hasattr(options_class, "POSITIONAL") and arguments and not arguments[0].startswith("-"):
        arguments = [f"--{options_class.POSITIONAL}", *arguments]
    if {"-h", "--help"} & set(arguments):
        # Print the docstring, with fields as flags; the options of a log are for --help-all.
        text = inspect.cleandoc(options_class.__doc__)
        text = text.replace("Args:", "Options; --help-all shows all, with their defaults:")
        text = re.sub(r"^ {4}read: .*", "", text, flags=re.MULTILINE)
        text = re.sub(r"^ {4}(\w+):", lambda name: f"  --{name[1].replace('_', '-')}:", text, flags=re.MULTILINE)
        print(text.rstrip())
        return 0
    if (result := getattr(module, function)(_parse(options_class, arguments, f"tritonemb {name}"))) is not None:
        print(result)
    return 0


def _doctor(arguments: list[str]) -> int:
    parser = _Parser(
        prog="tritonemb doctor",
        description="Print versions, devices and the kernel of each op with the reason, and check a training step.",
        epilog="example: tritonemb doctor --device cuda",
    )
    parser.add_argument("--device", default=None, help="check this device only (default: the CPU and every GPU)")
    parser.add_argument("--servers", help="check these embedding servers only: grpc://HOST:PORT,...")
    parser.add_argument("--clear-kernels", action="store_true", help="only remove the cache of compiled kernels")
    options = parser.parse_args(arguments)
    from tritonemb.training.doctor import clear_kernels, examine, examine_servers

    if options.servers is not None:
        text, healthy = examine_servers(options.servers.split(","))
    else:
        text, healthy = (clear_kernels(), True) if options.clear_kernels else examine(options.device)
    print(text)
    return 0 if healthy else 1


def _parse(kind: type[Any], arguments: list[str], prog: str, **options: Any) -> Any:
    tyro = require("tyro")
    for name in (word.partition("=")[0].replace("_", "-") for word in arguments):
        if name in RENAMED_OPTIONS:
            raise ValueError(f"unknown option {name}; it is now {RENAMED_OPTIONS[name]}")
    flags = ["--help" if word == "--help-all" else word for word in arguments]
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            return tyro.cli(kind, args=flags, prog=prog, config=(tyro.conf.OmitArgPrefixes,), **options)
    except SystemExit as system_exit:
        if not system_exit.code:
            raise
        if type(system_exit.__context__) is ValueError:  # an option out of range
            raise system_exit.__context__ from None
        # tyro prints a box: the problem, then options with similar names or the help of this option.
        message = " ".join(output.getvalue().replace("│", " ").splitlines()[1:-1])
        problem, _, suggestion = re.sub(r"\s*[─-]{5,}\s*", "─", " ".join(message.split())).strip("─ ").partition("─")
        problem = re.sub(r"^Error parsing ([a-z][\w.]*: )?", "", problem)
        problem = re.sub(r"(--[\w-]+) [A-Z].*?\(required\)", r"\1", problem)
        nearest = re.match(r"Perhaps you meant: (--[\w-]+)", suggestion)
        hint = f"did you mean {nearest[1]!r}?" if nearest else f"see {prog} --help"
        raise ValueError(f"{problem.rstrip('.')}; {hint}") from None


# Commands by name: module, class of options and function.
_SIMPLE = {
    "predict": ("tritonemb.serving.commands", "PredictOptions", "predict"),
    "evaluate": ("tritonemb.serving.commands", "EvaluateOptions", "evaluate"),
    "export": ("tritonemb.serving.export", "ExportOptions", "run_export"),
    "serve": ("tritonemb.serving.http", "ServeOptions", "serve"),
    "compare": ("tritonemb.training.callbacks.report", "CompareOptions", "compare"),
    "vocab": ("tritonemb.data.convert", "VocabOptions", "make_vocabulary"),
    "convert": ("tritonemb.data.convert", "ConvertOptions", "convert_log"),
    "reader": ("tritonemb.data.open", "ReaderOptions", "run_reader"),
    "embedding-server": ("tritonemb.server.launch", "ServerOptions", "serve"),
    "plan": ("tritonemb.training.job", "PlanOptions", "make_plan"),
    "calibrate": ("tritonemb.training.job", "CalibrateOptions", "run_calibration"),
}
COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    **{name: functools.partial(_run, name) for name in _SIMPLE},
    "doctor": _doctor,
}
