"""The process of `trial`: compiles grammars that may take for ever, for the vocabulary of a checkpoint.

    python trial_process.py FOLDER VOCAB_SIZE CPU_SECONDS MEMORY_BYTES STACK_BYTES LEXER_STATES

It writes an empty message once it is ready. Then, until its input ends: a grammar's source comes in; the
bytes that it has taken go out, a space, and what is wrong with it, nothing when it is good. A message is four
bytes with its length, highest first, and UTF-8. A grammar that takes more ends the process: by SIGXCPU,
without memory, or by SIGSEGV, without stack.
"""

from __future__ import annotations

import ctypes
import math
import resource
import sys

from llguidance import LLMatcher, LLParserLimits

from workers.structured.vocabulary import read_vocabulary

_ADDRESS_SPACE, _RESIDENT = 0, 1  # columns of /proc/self/statm


def main() -> None:
    """See above."""
    folder = sys.argv[1]
    vocab_size, cpu_s, memory_bytes, stack_bytes, max_lexer_states = map(int, sys.argv[2:])
    tokenizer = read_vocabulary(folder, vocab_size)
    memory_bytes += _num_bytes(_ADDRESS_SPACE)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_STACK, (stack_bytes, stack_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)  # glibc's: memory that was freed
    limits = LLParserLimits(max_lexer_states=max_lexer_states, verbose_errors=False)
    _write("")
    while len(head := sys.stdin.buffer.read(4)) == 4:
        source = sys.stdin.buffer.read(int.from_bytes(head)).decode()
        used = resource.getrusage(resource.RUSAGE_SELF)
        until_s = math.ceil(used.ru_utime + used.ru_stime) + cpu_s
        resource.setrlimit(resource.RLIMIT_CPU, (until_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        give_back(0)
        before = _num_bytes(_RESIDENT)
        # Without a vocabulary no lexer is made, which may be most of the work.
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
        problem = matcher.get_error() if matcher.is_error() else ""
        if not problem:
            matcher.compute_bitmask()  # a limit that it comes to is found again where answers are made
        give_back(0)
        _write(f"{max(0, _num_bytes(_RESIDENT) - before)} {problem}")
        del matcher


def _num_bytes(column: int) -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[column]) * resource.getpagesize()


def _write(text: str) -> None:
    content = text.encode()
    sys.stdout.buffer.write(len(content).to_bytes(4) + content)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
