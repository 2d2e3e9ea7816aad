"""`python -m bench NAME`: the benchmarks by name."""

import sys

from bench import deadline, durability, paper, sessions, throughput

BENCHMARKS = {
    "throughput": throughput.run,
    "durability": durability.run,
    "deadline": deadline.run,
    "paper": paper.run,
    "sessions": sessions.run,
}


def _nexmark(argv: list[str]) -> None:
    """Imported when it is asked for: it needs DuckDB."""
    from bench.nexmark import benchmark

    benchmark.run(argv)


BENCHMARKS["nexmark"] = _nexmark


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in BENCHMARKS:
        sys.exit(f"usage: python -m bench NAME [--json]; the benchmarks are: {', '.join(BENCHMARKS)}")
    BENCHMARKS[name](sys.argv[2:])


if __name__ == "__main__":
    main()
