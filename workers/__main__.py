"""The engine on a bare machine, without a cluster: `python -m workers --help`."""

from __future__ import annotations

import argparse
import sys

from workers.runtime.launch import run_follower


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m workers")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("rank")
    args = parser.parse_args(arguments)
    if args.command == "rank":
        return run_follower(sys.stdin.read())
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
