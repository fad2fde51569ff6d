"""A million rows of Parquet: what the first task costs in memory. Seconds are measured, and not asserted."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_million_rows_do_not_lie_in_memory() -> None:
    command = [sys.executable, "-m", "benchmarks.large_data", "--rows", "1000000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tasks"] == 1_000_000
    assert found["file_megabytes"] > 300  # of which memory never holds all
    assert found["megabytes"] < 300
