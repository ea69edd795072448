from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.environments import run_script

HERE = Path(__file__).parent


@pytest.mark.slow
def test_adapters_are_merged_as_by_peft_with_the_same_bits(tmp_path: Path) -> None:
    (num_kinds, num_pieces), (_, num_pieces_of_rank_1) = run_script(
        "transformers", HERE / "merged_adapters.py", [tmp_path]
    )
    assert num_kinds == 17
    # Some tensors were larger than a bucket, and rank 1 got none.
    assert num_pieces > 0 and num_pieces_of_rank_1 == 0
