"""The command line, `metagym <command>`. Finding a command costs no import beyond this module.

A command is a function of the arguments after its name that returns the exit code. Most live in experiments/
and are reached by name, at run time: this module, like all of metagym/, imports nothing above it.

Exit codes: 0 done; 1 it was tried and did not succeed; 2 what was asked makes no sense, or something needed
for it is not installed, said in a line on stderr; 128 + n ended by signal n.
"""

import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from metagym.errors import CheckpointError, InputError, MissingExtraError, TrainingError, UnknownNameError

COMMANDS = {
    "train": ("metagym.experiments.train:train_command", "train a model as a config file says"),
    "eval": ("metagym.experiments.train:eval_command", "measure a trained model, or one as it comes"),
    "tasks": ("metagym.tasks:command", "list worlds and their tasks, show one, play one by hand"),
    "ict": ("metagym.experiments.ict:command", "collect experience for a reflector, measure one"),
    "export": ("metagym.experiments.export:command", "a checkpoint as a Hugging Face directory"),
    "serve": ("metagym.experiments.serve:command", "a model behind the proxy that records every token"),
    "doctor": ("metagym.experiments.doctor:command", "what is installed, what works, what is missing"),
}
# Which extra brings a module whose import fails.
EXTRA_OF = {
    **dict.fromkeys(("nle", "minihack", "minigrid"), "minihack"),
    **dict.fromkeys(("alfworld", "textworld", "fast_downward"), "alfworld"),
}

# What a disk or a path says no with: the message is all that there is to know.
DISK = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM),
    *(errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),
)

USAGE = (
    "usage: metagym <command> [arguments]\n\n"
    + "".join(f"  metagym {name:8s} {what}\n" for name, (_, what) in COMMANDS.items())
    + "\n`metagym <command> --help` says what a command takes.\n"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; an error of the input is a line on stderr, no traceback."""
    name, *arguments = (sys.argv[1:] if argv is None else argv) or [""]
    try:
        if name in ("-h", "--help", "help"):
            print(USAGE, end="")
            return 0
        if name not in COMMANDS:
            raise (
                UnknownNameError("command", name, COMMANDS)
                if name
                else InputError("no command given.\n" + USAGE)
            )
        module, function = COMMANDS[name][0].split(":")
        try:
            command = getattr(importlib.import_module(module), function)
        except ModuleNotFoundError as error:
            missing = (error.name or "").split(".")[0]
            if missing == "metagym":
                raise
            raise MissingExtraError(f"metagym {name}", EXTRA_OF.get(missing, "train"), error) from error
        return command(arguments)
    except (InputError, MissingExtraError) as error:
        print(f"metagym: {error}", file=sys.stderr)
        return 2
    except (TrainingError, CheckpointError) as error:
        print(f"metagym: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read the output has gone, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in DISK:
            raise
        print(f"metagym: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print(f"metagym: {str(error) or 'interrupted'}", file=sys.stderr)
        return 128 + getattr(error, "signum", signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())
