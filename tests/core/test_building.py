"""Whether something is being built is a matter of the process, not of a thread: autograd has threads of its
own.
"""

from concurrent.futures import ThreadPoolExecutor

from effcompile.core.building import building, under_way


def test_building_is_a_matter_of_the_process() -> None:
    assert not under_way()
    with building():
        with building():
            assert under_way()
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(under_way).result()
    assert not under_way()
