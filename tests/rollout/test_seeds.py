"""Seeds of requests: one for every place in a run, the same on every machine, within vLLM's range."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from trace_megatron.rollout.seeds import request_seed
from trace_megatron.types import ROOT, Anchor

small = st.integers(min_value=0, max_value=3)
anchors = st.one_of(st.just(ROOT), st.builds(Anchor, small, st.integers(min_value=1, max_value=3)))
prompt_ids = st.sampled_from(["1", "11", "1/1", "a", "ä", '"]'])
places = st.tuples(small, small, prompt_ids, anchors, small, small)


@given(places, places)
def test_another_place_has_another_seed(place, other):
    assert (request_seed(*place) == request_seed(*other)) == (place == other)


@given(places)
def test_seeds_fit_a_signed_64_bit_integer(place):
    assert 0 <= request_seed(*place) < 2**63


def test_seeds_use_the_whole_range():
    seeds = [request_seed(0, 0, "prompt", ROOT, k, 0) for k in range(1000)]
    assert max(seeds) > 2**62
    for bit in range(63):
        assert 400 < sum(seed >> bit & 1 for seed in seeds) < 600


def test_another_process_draws_the_same():
    code = (
        "from trace_megatron.rollout.seeds import request_seed; from trace_megatron.types import Anchor;"
        "print(request_seed(3, 14, 'prompt-15', Anchor(9, 2), 6, 5))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == request_seed(3, 14, "prompt-15", Anchor(9, 2), 6, 5)
