"""The process of `trial`: compiles grammars that may take for ever. It loads nothing of this package.

    python trial_process.py CPU_SECONDS MEMORY_BYTES STACK_BYTES LEXER_STATES

It writes an empty message once it is ready. Then, until its input ends: a grammar's source comes in, what is
wrong with it goes out, empty when it is good. A message is four bytes with its length, highest first, and
UTF-8. A grammar that takes more ends the process: by SIGXCPU, without memory, or by SIGSEGV, without stack.
"""

from __future__ import annotations

import math
import resource
import sys

from llguidance import LLMatcher, LLParserLimits


def main() -> None:
    """See above."""
    cpu_s, memory_bytes, stack_bytes, max_lexer_states = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_STACK, (stack_bytes, stack_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limits = LLParserLimits(max_lexer_states=max_lexer_states, verbose_errors=False)
    _write("")
    while len(head := sys.stdin.buffer.read(4)) == 4:
        source = sys.stdin.buffer.read(int.from_bytes(head)).decode()
        used = resource.getrusage(resource.RUSAGE_SELF)
        until_s = math.ceil(used.ru_utime + used.ru_stime) + cpu_s
        resource.setrlimit(resource.RLIMIT_CPU, (until_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        _write(LLMatcher.validate_grammar(source, None, limits=limits))


def _write(text: str) -> None:
    content = text.encode()
    sys.stdout.buffer.write(len(content).to_bytes(4) + content)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
