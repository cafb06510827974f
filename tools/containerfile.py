"""Builds and runs the image of deploy/Containerfile in a folder, without a container engine; as root, on Linux.

    python tools/containerfile.py build ROOT [NAME=VALUE ...]    with values of the Containerfile's ARGs
    python tools/containerfile.py run ROOT [ARGUMENT ...]        with arguments of the image's entrypoint

ROOT is a system whose `python` and `pip` stand for those of the base image; docs/deploy.md makes one.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
# In a namespace of the process, so that mounts end with it.
ENTER = 'mount --rbind /dev "$0/dev" && mount -t proc proc "$0/proc" && exec chroot --userspec="$1" "$0" sh -c "$2"'


def instructions(text: str) -> list[list[str]]:
    """Return keyword and rest of each instruction of the last stage and, before, of the stages that it is based on."""
    lines = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", "").splitlines()
    stages, name = dict[str, list[list[str]]](), ""
    for keyword, rest in (line.split(maxsplit=1) for line in lines if line.strip()):
        if keyword == "FROM":
            base, _, name = rest.partition(" AS ")
            stages[name] = [*stages.get(base, [])]
        else:
            stages[name].append([keyword, rest])
    return stages[name]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("build", "run"))
    parser.add_argument("root", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    build, root = options.action == "build", options.root.resolve()
    values = dict(item.split("=", 1) for item in options.arguments if build)
    variables, folder, user, entrypoint = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}, Path("/"), "0:0", ""

    def run(command: str) -> int:
        enter = ["unshare", "--mount", "sh", "-c", ENTER, str(root), user, f"cd {folder} && {command}"]
        return subprocess.run(enter, env=variables, check=build).returncode

    for keyword, rest in instructions((REPOSITORY / "deploy" / "Containerfile").read_text()):
        if keyword in ("ARG", "ENV"):
            pairs = (word.split("=", 1) for word in shlex.split(rest))
            variables |= {name: values.get(name, value) for name, value in pairs}
        elif keyword == "WORKDIR":
            folder = Path(rest)
            (root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif keyword == "USER":
            user = rest
        elif keyword == "ENTRYPOINT":
            entrypoint = shlex.join(json.loads(rest))
        elif keyword == "RUN" and build:
            print(f"RUN {rest}", flush=True)
            run(rest)
        elif keyword == "COPY" and build:
            *sources, place = rest.split()
            copy = ["cp", "-r" if place.endswith("/") else "-rT", *sources, f"{root}{folder / place}"]
            subprocess.run(copy, cwd=REPOSITORY, check=True)
        elif keyword not in ("RUN", "COPY"):
            raise SystemExit(f"error: {keyword} is not supported")
    return 0 if build else run(f"{entrypoint} {shlex.join(options.arguments)}")


if __name__ == "__main__":
    sys.exit(main())
