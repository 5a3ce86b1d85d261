"""``python -m benchmarks``: the benchmarks that need no GPU."""

from benchmarks.cpu import main

main()
