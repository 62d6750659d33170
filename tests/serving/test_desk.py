"""The queue and its thread: every request has its own tokens, whatever the others do; limits; requests that
nobody waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from generation_models import bare, captured, ids
from torch import nn

from effcompile.core.errors import UsageError
from effcompile.runtime.generation.rows import SharedRows
from effcompile.serving.desk import BusyError, Desk, End, Wish

CONTEXT, PLACES, QUEUE = 64, 3, 40


class Client:
    """What was said to it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended: End | None = None
        self.done, self.began = threading.Event(), threading.Event()
        self.late = False

    def __call__(self, token: int | None, ended: End | None) -> None:
        self.late |= self.ended is not None
        if token is not None:
            self.tokens.append(token)
            self.began.set()
        self.ended = ended
        if ended is not None:
            self.done.set()

    def wait(self) -> list[int]:
        assert self.done.wait(60)
        assert not self.late, "nothing is said after the end"
        return self.tokens


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return captured("llama", num_hidden_layers=1)[0]


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk(
        SharedRows(bare(captured("llama", num_hidden_layers=1), context=CONTEXT)[1].stepper),
        64,
        places=PLACES,
        queue=QUEUE,
    )
    yield made
    made.close()


def ask(desk: Desk, text: int = 0, prompt: int = 5, most: int = 12, **more: Any) -> tuple[Wish, Client, Any]:
    wish, client = Wish(prompt=tuple(ids(prompt, seed=text).tolist()), most=most, **more), Client()
    (ticket,) = desk.take([wish], [client])
    return wish, client, ticket


def greedy(model: nn.Module, wish: Wish) -> list[int]:
    made = model.generate(torch.tensor([wish.prompt]), max_new_tokens=wish.most, do_sample=False)
    return made[0, len(wish.prompt) :].tolist()


def test_every_request_has_its_own_tokens(desk: Desk, model: nn.Module) -> None:
    """Forty clients in six threads, every fifth of whom goes away; the oracle is transformers' generate() of
    each prompt alone.
    """
    found: list[tuple[Wish, Client, bool]] = []

    def clients(thread: int) -> None:
        for at in range(7):
            seed = 7 * thread + at
            wish, client, ticket = ask(desk, seed, prompt=1 + seed % 23, most=1 + seed % 17)
            if seed % 5 == 4:
                ticket.cancel()
            found.append((wish, client, seed % 5 == 4))

    threads = [threading.Thread(target=clients, args=(at,)) for at in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 42
    for wish, client, gone in found:
        said, wanted = client.wait(), greedy(model, wish)
        assert said == wanted[: len(said)] if gone else said == wanted


def test_a_place_is_free_when_its_client_is_gone(desk: Desk, model: nn.Module) -> None:
    held = [ask(desk, at, most=58) for at in range(PLACES)]
    for _, client, _ in held:
        assert client.began.wait(60)
    for _, _, ticket in held:
        ticket.cancel()
    wish, client, _ = ask(desk, 9)
    assert client.wait() == greedy(model, wish)
    assert {other.ended for _, other, _ in held if other.done.wait(60)} <= {"cancelled", "length"}


def test_the_queue_is_bounded(desk: Desk) -> None:
    taken, refused = [], 0
    for at in range(300):
        try:
            taken.append(ask(desk, at, most=50)[1])
        except BusyError:
            refused += 1
    assert refused and all(len(client.wait()) == 50 for client in taken)


def test_several_are_taken_or_none(desk: Desk) -> None:
    wishes = [Wish(prompt=(5,), most=4)] * (PLACES + QUEUE + 1)
    with pytest.raises(BusyError, match="40 may"):
        desk.take(wishes, [Client() for _ in wishes])
    clients = [Client() for _ in wishes[1:]]
    desk.take(wishes[1:], clients)
    assert {tuple(client.wait()) for client in clients} == {tuple(clients[0].tokens)}


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (Wish(prompt=(), most=1), "no tokens"),
        (Wish(prompt=(5, 64), most=1), "0 to 63"),
        (Wish(prompt=(-1,), most=1), "0 to 63"),
        (Wish(prompt=(5,) * 60, most=5), "Ask for 4 or fewer"),
        (Wish(prompt=(5,) * 64, most=1), "shorter prompt"),
        (Wish(prompt=(5,), most=0), "at least one"),
    ],
)
def test_what_cannot_be_computed_is_refused_in_words(desk: Desk, wish: Wish, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        desk.take([wish], [Client()])


def test_stop_tokens_are_not_said(desk: Desk, model: nn.Module) -> None:
    plain, first, _ = ask(desk, 3)
    stop = first.wait()[4]
    _, client, _ = ask(desk, 3, stops=frozenset([stop]))
    assert client.wait() == first.tokens[: first.tokens.index(stop)] and client.ended == "stop"
    assert first.ended == "length" and first.tokens == greedy(model, plain)


def test_drawn_tokens_hang_on_their_own_seed_alone(desk: Desk) -> None:
    how: dict[str, Any] = {"temperature": 0.9, "top_p": 0.8, "seed": 11}
    alone = ask(desk, 1, **how)[1].wait()
    among = [ask(desk, at, temperature=1.0, seed=at) for at in range(4)]
    again = ask(desk, 1, **how)[1]
    assert again.wait() == alone and [client.wait() for _, client, _ in among][1] != alone


def test_a_prompt_that_begins_like_one_before_begins_with_its_cache(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of forty tokens in common none is read again; the oracle is generate() of each prompt alone."""
    read: list[int] = []
    own = SharedRows.read
    monkeypatch.setattr(
        SharedRows, "read", lambda self, cache, tokens: read.append(len(tokens)) or own(self, cache, tokens)
    )
    rows = SharedRows(bare(captured("llama", num_hidden_layers=1), context=CONTEXT)[1].stepper)
    desk, common = Desk(rows, 64, places=PLACES, queue=QUEUE, prompts=2), ids(40).tolist()
    for ending, fresh in (([5, 6, 7], 43), ([5, 6, 8, 9], 2), ([5, 6, 7], 1), ([], 1)):
        wish, client = Wish(prompt=(*common, *ending), most=9), Client()
        desk.take([wish], [client])
        assert client.wait() == greedy(model, wish) and read[-1] == fresh
    desk.close()
    assert len(read) == 4


@pytest.mark.parametrize("kind", ["gemma3_text", "mamba", "jamba"])
def test_windows_and_states_forget_how_a_prompt_began(kind: str) -> None:
    rows = SharedRows(bare(captured(kind), context=CONTEXT)[1].stepper)
    cache = rows.opened()
    rows.read(cache, ids(30).tolist())
    assert rows.begun(cache, 20) is None


@pytest.mark.parametrize("kind", ["mamba", "jamba"])
def test_states_of_each_request_are_its_own(kind: str) -> None:
    """More requests than places, prompts of all lengths, with prompts to begin with kept; the oracle is
    generate() of each alone.
    """
    model, executable = bare(captured(kind), context=CONTEXT)
    desk = Desk(SharedRows(executable.stepper), 64, places=PLACES, queue=QUEUE, prompts=2)
    asked = [ask(desk, text=text % 4, prompt=3 + 5 * text, most=4 + 3 * text) for text in range(7)]
    for wish, client, _ in asked:
        assert client.wait() == greedy(model, wish)
    desk.close()


def test_one_failure_ends_its_requests_and_no_later_ones(
    desk: Desk, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: SharedRows, tokens: list[int]) -> None:
        monkeypatch.undo()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(SharedRows, "next", broken)
    _, client, _ = ask(desk, 1)
    client.wait()
    assert client.ended == "failed"
    wish, client, _ = ask(desk, 2)
    assert client.wait() == greedy(model, wish)


def test_an_error_while_rows_change_ends_requests_and_not_the_desk(
    desk: Desk, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice: once in a turn, and once more where that turn's requests are ended."""
    own, left = SharedRows.change, [1, 1]

    def broken(self: SharedRows, keep: list[int], joining: list[Any]) -> None:
        if left:
            left.pop()
            raise RuntimeError("out of memory")
        own(self, keep, joining)

    monkeypatch.setattr(SharedRows, "change", broken)
    for at in (1, 2):
        _, client, _ = ask(desk, at)
        client.wait()
        assert client.ended == "failed"
    wish, client, _ = ask(desk, 3)
    assert client.wait() == greedy(model, wish)


def test_a_client_that_cannot_be_told_is_gone(desk: Desk, model: nn.Module) -> None:
    def deaf(token: int | None, ended: End | None) -> None:
        raise RuntimeError("Event loop is closed")

    held = [ask(desk, at, most=30) for at in range(2)]
    desk.take([Wish(prompt=(5,), most=50)], [deaf])
    for wish, client, _ in held:
        assert client.wait() == greedy(model, wish)


def test_logits_that_nothing_can_be_drawn_from_fail_one_request(
    desk: Desk, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temperature of nearly nothing takes the likeliest token, as one of nothing does."""
    cold, plain = ask(desk, 4, temperature=1e-320), ask(desk, 4)
    assert cold[1].wait() == plain[1].wait() == greedy(model, plain[0])
    own = SharedRows.next

    def spoiled(self: SharedRows, tokens: list[int]) -> torch.Tensor:
        logits = own(self, tokens)
        logits[0] = torch.nan
        return logits

    monkeypatch.setattr(SharedRows, "next", spoiled)
    _, first, _ = ask(desk, 5, temperature=1.0, most=40)
    assert first.began.wait(60)
    second = ask(desk, 6, temperature=1.0, most=5)[1]
    first.wait()
    second.wait()
    assert first.ended == "failed" and second.ended in ("failed", "length")


def test_closing_ends_all_requests(desk: Desk) -> None:
    clients = [ask(desk, at, most=58)[1] for at in range(10)]
    desk.close()
    assert all(client.done.wait(1) for client in clients)
    with pytest.raises(BusyError):
        ask(desk)
