"""The mailbox without a network: who gets which message, who may answer it, and what is kept."""

import asyncio
import gc
import weakref

import pytest

from coterie.deploy.mailbox import MOST_WAITING, PIECE, Mailbox, ReplacedError, SiteMessage, pieces

LONG = 60.0  # seconds that no test waits for


class Bytes(bytearray):
    """Bytes whose end can be noticed."""


def run(work):
    return asyncio.run(asyncio.wait_for(work, LONG))


async def turn() -> None:
    """Let all other tasks run until they wait."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_message_reaches_its_site_and_the_answer_its_asker():
    async def story():
        box = Mailbox(silence=LONG)
        asked = asyncio.create_task(box.ask("a", b"question", LONG))
        message = await box.poll("a", LONG)
        assert message.body == b"question"
        assert box.answer("a", message.id, b"answer")
        assert await asked == b"answer"

    run(story())


def test_a_poll_that_began_earlier_gets_the_message_at_once():
    async def story():
        box = Mailbox(silence=LONG)
        polled = asyncio.create_task(box.poll("a", LONG))
        await turn()
        asked = asyncio.create_task(box.ask("a", b"question", LONG))
        message = await polled
        box.answer("a", message.id, b"")
        assert message.body == b"question"
        assert await asked == b""

    run(story())


def test_sites_get_their_own_messages_alone():
    async def story():
        box = Mailbox(silence=LONG)
        asked = [asyncio.create_task(box.ask(site, site.encode(), LONG)) for site in "ab"]
        await turn()
        mine, theirs = await box.poll("a", LONG), await box.poll("b", LONG)
        assert (mine.body, theirs.body) == (b"a", b"b")
        assert await box.poll("c", 0.0) is None
        for task in asked:
            task.cancel()

    run(story())


@pytest.mark.parametrize("answered_by", ["another site", "an unknown id", "twice"])
def test_answers_that_nobody_expects_change_nothing(answered_by):
    async def story():
        box = Mailbox(silence=LONG)
        asked = asyncio.create_task(box.ask("a", b"question", LONG))
        message = await box.poll("a", LONG)
        if answered_by == "another site":
            assert not box.expects("b", message.id)
            assert not box.answer("b", message.id, b"forged")
        elif answered_by == "an unknown id":
            assert not box.answer("a", message.id[:-1], b"forged")
        assert box.expects("a", message.id)
        assert box.answer("a", message.id, b"answer")
        assert not box.answer("a", message.id, b"second")
        assert await asked == b"answer"
        assert not box.expects("a", message.id)
        assert not box.answer("a", message.id, b"late")

    run(story())


def test_a_site_that_polls_again_gets_the_same_message_again():
    async def story():
        box = Mailbox(silence=LONG)
        asked = asyncio.create_task(box.ask("a", b"question", LONG))
        first = await box.poll("a", LONG)
        assert await box.poll("a", LONG) == first
        box.answer("a", first.id, b"answer")
        assert await asked == b"answer"
        assert await box.poll("a", 0.0) is None

    run(story())


def test_messages_come_in_the_order_in_which_they_were_asked():
    async def story():
        box = Mailbox(silence=LONG)
        asked = [asyncio.create_task(box.ask("a", bytes([i]), LONG)) for i in range(3)]
        for i in range(3):
            message = await box.poll("a", LONG)
            assert message.body == bytes([i])
            box.answer("a", message.id, bytes([i + 10]))
        assert await asyncio.gather(*asked) == [b"\x0a", b"\x0b", b"\x0c"]

    run(story())


def test_a_newer_poll_replaces_an_older_one():
    async def story():
        box = Mailbox(silence=LONG)
        older = asyncio.create_task(box.poll("a", LONG))
        await turn()
        newer = asyncio.create_task(box.poll("a", LONG))
        with pytest.raises(ReplacedError):
            await older
        asked = asyncio.create_task(box.ask("a", b"question", LONG))
        message = await newer
        box.answer("a", message.id, b"answer")
        assert await asked == b"answer"

    run(story())


@pytest.mark.parametrize("first", ["message", "end"])
def test_a_poll_whose_connection_is_gone_takes_no_message_with_it(first):
    async def story():
        box = Mailbox(silence=LONG)
        gone = asyncio.create_task(box.poll("a", LONG))
        await turn()
        asked = asyncio.create_task(box.ask("a", b"question", LONG))
        if first == "message":
            await asyncio.sleep(0)  # the message has ended the poll, whose task has not run yet
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        message = await box.poll("a", LONG)
        box.answer("a", message.id, b"answer")
        assert await asked == b"answer"

    run(story())


def test_no_answer_in_time_is_lost_and_a_late_one_is_refused():
    async def story():
        box = Mailbox(silence=LONG)
        asked = asyncio.create_task(box.ask("a", b"question", 0.05))
        message = await box.poll("a", LONG)
        assert await asked == "lost"
        assert not box.answer("a", message.id, b"late")

    run(story())


def test_a_silent_site_is_lost_long_before_the_deadline():
    async def story():
        box = Mailbox(silence=0.05)
        assert await box.ask("a", b"question", LONG) == "lost"  # it never came
        box.sign("a")
        await asyncio.sleep(0.06)
        assert not box.online("a")
        soon = asyncio.create_task(box.ask("a", b"question", LONG))
        await turn()
        assert soon.done()  # it is known to be offline: nobody waits for it again
        assert soon.result() == "lost"

    run(story())


def test_signs_of_life_keep_a_message_waiting():
    async def story():
        box = Mailbox(silence=0.2)
        asked = asyncio.create_task(box.ask("a", b"question", LONG))
        message = await box.poll("a", LONG)
        for _ in range(8):
            await asyncio.sleep(0.05)
            box.sign("a")
        assert not asked.done()
        box.answer("a", message.id, b"answer")
        assert await asked == b"answer"

    run(story())


def test_a_site_that_polls_is_online_however_long_it_waits():
    async def story():
        box = Mailbox(silence=0.02)
        assert (box.online("a"), box.seen("a")) == (False, None)
        poll = asyncio.create_task(box.poll("a", LONG))
        await asyncio.sleep(0.05)
        assert (box.online("a"), box.seen("a")) == (True, 0.0)
        asked = asyncio.create_task(box.ask("a", b"question", LONG))
        message = await poll
        box.answer("a", message.id, b"answer")
        assert await asked == b"answer"
        await asyncio.sleep(0.03)
        assert not box.online("a")
        assert box.seen("a") >= 0.02

    run(story())


def test_an_answer_that_could_not_be_read_ends_the_message_with_its_reason():
    async def story():
        box = Mailbox(silence=LONG)
        asked = asyncio.create_task(box.ask("a", b"question", LONG))
        message = await box.poll("a", LONG)
        box.answer("a", message.id, "unreadable")
        assert await asked == "unreadable"

    run(story())


def test_the_number_of_waiting_messages_is_bounded():
    async def story():
        box = Mailbox(silence=LONG)
        asked = []
        while not box.full("a"):
            asked.append(asyncio.create_task(box.ask("a", b"", LONG)))
            await turn()
        assert len(asked) == MOST_WAITING
        assert not box.full("b")
        asked[0].cancel()
        await turn()
        assert not box.full("a")
        for task in asked:
            task.cancel()

    run(story())


@pytest.mark.parametrize("end", ["answered", "given up", "asker gone"])
def test_nothing_of_a_message_stays_when_it_is_over(end):
    async def story():
        box = Mailbox(silence=LONG)
        question, answer = Bytes(b"question"), Bytes(b"answer")
        traces = [weakref.ref(question), weakref.ref(answer)]
        asked = asyncio.create_task(box.ask("a", question, 0.02 if end == "given up" else LONG))
        message: SiteMessage | None = await box.poll("a", LONG)
        if end == "answered":
            box.answer("a", message.id, answer)
        elif end == "asker gone":
            asked.cancel()
        await asyncio.wait([asked])
        assert await box.poll("a", 0.0) is None
        del question, answer, message, asked
        gc.collect()
        assert [trace() for trace in traces] == [None, None]

    run(story())


@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1, 3 * PIECE])
def test_pieces_are_the_body(size):
    async def story():
        body = bytes(i % 251 for i in range(size))
        found = [piece async for piece in pieces(bytearray(body))]
        assert b"".join(found) == body
        assert all(0 < len(piece) <= PIECE for piece in found)

    run(story())
