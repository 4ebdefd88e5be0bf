"""The share of the cache that holds tokens, over the beginning of a real service's trace."""

from collections.abc import Callable
from pathlib import Path

import pytest
from exporting import uncertified

from pagelet.exporter import export
from pagelet.models.errors import InputError
from pagelet.tools.waste import TraceRequest, read_trace, replay, simulate

TRACE = Path(__file__).parent.parent / "data" / "azure_llm_conv_2023_excerpt.csv"


@pytest.mark.parametrize("block_size", [16, 32])
def test_paging_wastes_less_than_four_percent(block_size: int) -> None:
    requests = read_trace(TRACE, 150)
    result = simulate(requests, block_size=block_size)
    assert result.requests == 150
    assert result.used(result.paged) >= 0.96
    # What the same sequences would have taken in one piece each, in the same steps.
    assert result.used(result.whole_context) < 0.5
    assert result.used(result.longest_reply) < 0.8


def test_a_small_cache_preempts_and_wastes_no_more() -> None:
    requests = [TraceRequest(0.0, 100, 100) for _ in range(20)]
    result = simulate(requests, block_size=16, cache_tokens=1024)
    assert result.preemptions > 0
    assert result.paged.max() <= 1024
    assert result.used(result.paged) >= 0.9  # sequences this short end in a partly filled block of 16 in 150


def test_one_sequence_by_hand() -> None:
    """3 tokens read, 2 generated, in blocks of 2: 3, 4 tokens held in 4, 4 slots."""
    result = simulate([TraceRequest(0.0, 3, 2)], block_size=2)
    assert result.live.tolist() == [3, 4]
    assert result.paged.tolist() == [4, 4]
    assert result.whole_context.tolist() == [5, 5]
    assert result.longest_reply.tolist() == [5, 5]


def test_a_real_engine_wastes_little_too(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    export(make_llama(), tmp_path / "b", uncertified(block_size=16))
    # Long enough that samples fall into it: some hundred steps.
    requests = [TraceRequest(0.001 * n, 200 + n, 250) for n in range(8)]
    assert 0.9 < replay(tmp_path / "b", requests) <= 1


@pytest.mark.parametrize("text", ["A,B\n1,2\n", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n"])
def test_a_file_that_is_no_trace(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(InputError, match="request 1: not a row"):
        read_trace(tmp_path / "t.csv")
