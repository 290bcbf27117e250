"""Which rank this process is."""

import pytest

from unidle.distributed.place import Place, current_place, require_one_rank
from unidle.errors import UsageError

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def test_torchrun_variables_say_which_rank_this_is() -> None:
    assert current_place(TORCHRUN) == Place(rank=5, size=8, local_rank=1, local_size=4)
    assert Place(5, 8, 1, 4).variables() == TORCHRUN


@pytest.mark.parametrize("missing", TORCHRUN)
def test_process_without_all_variables_trains_alone(missing: str) -> None:
    assert current_place({name: value for name, value in TORCHRUN.items() if name != missing}) is None
    assert current_place({**TORCHRUN, missing: "many"}) is None


def test_job_of_one_rank_trains_alone() -> None:
    assert current_place({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}) is None


def test_what_trains_in_one_process_is_refused_on_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    require_one_rank("A group of runs")
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="A group of runs does not train on several ranks; start it without torchrun"):
        require_one_rank("A group of runs")
