"""The benchmarks: `python -m bench` measures Windlass beside the peers that are installed."""
