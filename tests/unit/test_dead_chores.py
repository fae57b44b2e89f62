"""What the leader does with dead letters: archives and drops them, and replays them by rules."""

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from windlass.maintenance import dead as dead_module
from windlass.maintenance.archive import Archive, file_stem
from windlass.maintenance.chores import DeadCare, chores
from windlass.maintenance.dead import Removing, Replaying
from windlass.model.dead import DeadFilter, DeadLetter, DiscardAnswer, ReplayRule
from windlass.model.errors import NotLeader, StoreUnavailable
from windlass.model.task import ClaimRequest, Leadership, NewTask, Outcome, Settlement
from windlass.store.clock_watch import ClockWatch
from windlass.store.memory import MemoryStore

WORKER = UUID(int=1)
MINUTE = timedelta(minutes=1)
DAY = timedelta(days=1)
SILENT = {"type": "TimeoutError", "message": "gateway is silent", "class": "transient"}
_numbers = count(1)


class Letters(MemoryStore):
    """A store whose clock stands where it is put."""

    def __init__(self) -> None:
        self.time = datetime(2027, 3, 3, 12, tzinfo=UTC)
        self.breaks = False
        super().__init__(clock=lambda: self.time)

    async def bury(self, queue: str = "mail", error: dict[str, Any] | None = None) -> UUID:
        await self.enqueue([NewTask(UUID(int=next(_numbers)), "send", "{}", queue=queue)])
        return await self.fail(error)

    async def fail(self, error: dict[str, Any] | None = None) -> UUID:
        asked = ClaimRequest(WORKER, ("send",), 1, MINUTE, MINUTE)
        claim = (await self.claim(asked)).claim
        assert claim is not None
        (task,) = claim.tasks
        said = json.dumps(error or SILENT)
        await self.settle(
            [Settlement(claim.token, task.id, task.generation, Outcome.DEAD, error=said)]
        )
        self.time += timedelta(seconds=1)
        return task.id

    async def found(self) -> list[UUID]:
        return (await self.find_dead(DeadFilter())).ids[::-1]

    async def elected(self) -> Leadership:
        leadership = await self.lead(WORKER, current=None, term=100 * DAY)
        assert leadership is not None
        return leadership

    async def discard(
        self, task_ids: Sequence[UUID], *, leadership: Leadership | None = None
    ) -> list[DiscardAnswer]:
        if self.breaks:
            raise StoreUnavailable("away")
        return await super().discard(task_ids, leadership=leadership)


@pytest.fixture
def store() -> Letters:
    return Letters()


def archived(folder: Path) -> list[str]:
    lines = [line for file in sorted(folder.iterdir()) for line in file.read_text().splitlines()]
    return [json.loads(line)["id"] for line in lines]


def said(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.getMessage().startswith(event)]


# Too many, or too old


async def test_the_oldest_above_the_limit_are_dropped_and_that_is_said(
    store: Letters, caplog: pytest.LogCaptureFixture
) -> None:
    mail = [await store.bury("mail") for _ in range(4)]
    other = [await store.bury("other") for _ in range(3)]

    has_more = await Removing(store, most=2, archive=None)(await store.elected())

    assert await store.found() == mail[2:] + other[1:]
    assert not has_more
    assert said(caplog, "dead.dropped") == [
        "dead.dropped queue=mail letters=2 reason=more than 2 in the queue",
        "dead.dropped queue=other letters=1 reason=more than 2 in the queue",
    ]
    assert {one.levelname for one in caplog.records} == {"WARNING"}


async def test_what_is_archived_is_written_before_it_is_removed(
    store: Letters, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = [await store.bury() for _ in range(3)]
    removing = Removing(store, most=1, archive=Archive(tmp_path))

    await removing(await store.elected())

    assert archived(tmp_path) == [str(one) for one in ids[:2]]
    assert await store.found() == ids[2:]
    file = tmp_path / "dead-mail-2027-03-03.jsonl"
    (line,) = said(caplog, "dead.archived")
    assert line.endswith(f"letters=2 reason=more than 1 in the queue file={file}")


async def test_what_is_archived_is_on_the_disk_before_it_is_removed(
    store: Letters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_module, "ARCHIVED_AT_ONCE", 1)
    file = tmp_path / "kept" / "letters" / "dead-mail-2027-03-03.jsonl"
    sync, discard = os.fsync, store.discard
    on_disk: dict[int, int] = {}  # bytes, by inode: of files, and of the folders that name them
    removed: list[str] = []

    def fsync(descriptor: int) -> None:
        sync(descriptor)
        synced = os.fstat(descriptor)
        on_disk[synced.st_ino] = synced.st_size

    async def discard_what_is_safe(
        task_ids: Sequence[UUID], *, leadership: Leadership | None = None
    ) -> list[DiscardAnswer]:
        assert on_disk.get(file.stat().st_ino) == file.stat().st_size
        assert {folder.stat().st_ino for folder in list(file.parents)[:3]} <= on_disk.keys()
        removed.extend(map(str, task_ids))
        return await discard(task_ids, leadership=leadership)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(store, "discard", discard_what_is_safe)
    ids = [await store.bury() for _ in range(3)]

    await Removing(store, most=1, archive=Archive(file.parent))(await store.elected())

    assert removed == archived(file.parent) == [str(one) for one in ids[:2]]


async def test_a_crash_in_between_may_archive_twice_and_loses_nothing(
    store: Letters, tmp_path: Path
) -> None:
    ids = [await store.bury() for _ in range(2)]
    removing = Removing(store, most=1, archive=Archive(tmp_path))
    leadership = await store.elected()
    store.breaks = True

    with pytest.raises(StoreUnavailable):
        await removing(leadership)
    assert await store.found() == ids
    store.breaks = False
    await removing(leadership)

    assert archived(tmp_path) == [str(ids[0])] * 2
    assert await store.found() == ids[1:]


async def test_what_was_archived_before_a_turn_is_cut_off_is_removed_and_said(
    store: Letters,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(dead_module, "ARCHIVED_AT_ONCE", 1)
    ids = [await store.bury() for _ in range(3)]

    class Breaking(Archive):
        async def append(self, *letters: Any) -> Path:
            if len(await store.found()) == 2:
                raise OSError("no space left")
            return await super().append(*letters)

    with pytest.raises(OSError, match="no space"):
        await Removing(store, most=1, archive=Breaking(tmp_path))(await store.elected())

    assert archived(tmp_path) == [str(ids[0])]
    assert await store.found() == ids[1:]
    assert len(said(caplog, "dead.archived queue=mail letters=1")) == 1


async def test_what_cannot_be_archived_stays(store: Letters, tmp_path: Path) -> None:
    ids = [await store.bury() for _ in range(2)]
    (tmp_path / "file").write_text("")

    with pytest.raises(OSError, match="file"):
        await Removing(store, most=1, archive=Archive(tmp_path / "file"))(await store.elected())

    assert await store.found() == ids


async def test_only_what_was_archived_is_removed(store: Letters, tmp_path: Path) -> None:
    class Forgetful(Letters):
        async def read_dead(self, task_ids: Sequence[UUID]) -> list[DeadLetter]:
            return (await super().read_dead(task_ids))[:1]

    store = Forgetful()
    ids = [await store.bury() for _ in range(3)]

    await Removing(store, most=1, archive=Archive(tmp_path))(await store.elected())

    assert archived(tmp_path) == [str(ids[0])]
    assert await store.found() == ids[1:]


async def test_a_leader_that_was_deposed_removes_nothing(store: Letters) -> None:
    ids = [await store.bury() for _ in range(2)]
    await store.elected()

    with pytest.raises(NotLeader):
        await Removing(store, most=1, archive=None)(Leadership(WORKER, 7))

    assert await store.found() == ids


async def test_letters_out_of_time_are_archived_if_there_is_an_archive(
    store: Letters, tmp_path: Path
) -> None:
    care = DeadCare(archive=Archive(tmp_path))
    watch = ClockWatch(lease=MINUTE, heartbeat=MINUTE / 3)
    table = {one.name: one for one in chores(store, watch, sweep=5.0, care=care)}
    old = await store.bury()
    store.time += 32 * DAY
    new = await store.bury()
    leadership = await store.elected()

    await table["retain"].run(leadership)
    assert await store.found() == [old, new]
    await table["remove-dead"].run(leadership)

    assert archived(tmp_path) == [str(old)]
    assert await store.found() == [new]


async def test_removing_goes_on_at_once_while_there_is_more(
    store: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_module, "REMOVE_BATCH", 2)
    ids = [await store.bury() for _ in range(6)]
    removing = Removing(store, most=1, archive=None)
    leadership = await store.elected()

    turns = [await removing(leadership) for _ in range(3)]

    assert turns == [True, True, False]
    assert await store.found() == ids[5:]


async def test_letters_are_counted_once_for_all_batches_of_a_sweep(
    store: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_module, "REMOVE_BATCH", 2)
    for _ in range(6):
        await store.bury()
    counts, count_all = [], store.crowded_queues

    async def crowded_queues(most: int) -> list[str]:
        counts.append(most)
        return await count_all(most)

    monkeypatch.setattr(store, "crowded_queues", crowded_queues)
    removing = Removing(store, most=1, archive=None)
    leadership = await store.elected()

    while await removing(leadership):
        pass
    assert counts == [1]
    late = [await store.bury("other") for _ in range(2)]
    await removing(leadership)

    assert counts == [1, 1]
    assert late[0] not in await store.found()


async def test_no_more_is_removed_than_is_too_many_though_others_discard_meanwhile(
    store: Letters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_module, "ARCHIVE_BATCH", 2)
    ids = [await store.bury() for _ in range(8)]
    removing = Removing(store, most=3, archive=Archive(tmp_path))
    leadership = await store.elected()

    assert await removing(leadership)
    await store.discard(ids[5:7])
    while await removing(leadership):
        pass

    assert archived(tmp_path) == [str(one) for one in ids[:3]]
    assert await store.found() == [*ids[3:5], ids[7]]


async def test_without_a_limit_nothing_is_counted(store: Letters) -> None:
    ids = [await store.bury() for _ in range(3)]

    assert not await Removing(store, most=0, archive=None)(await store.elected())
    assert await store.found() == ids


NAMES = ["mail", "Mail", "a/b", "a_b", "a\\b", "..", "ä", "ö", " ", "x" * 200, "x" * 199, "con:1"]


def test_every_queue_has_a_file_of_its_own_that_any_system_takes() -> None:
    stems = [file_stem(name) for name in NAMES]

    assert len(set(stems)) == len(NAMES)
    for stem in stems:
        assert len(stem) < 120
        assert stem.isascii()
        assert not set(stem) & set("/\\:. ")


async def test_a_line_that_was_not_finished_spoils_no_other(store: Letters, tmp_path: Path) -> None:
    task_id = await store.bury()
    letters = await store.read_dead([task_id])
    archive = Archive(tmp_path / "new" / "folder")
    path = await archive.append("mail", letters, store.time)
    with path.open("a") as file:
        file.write('{"id": "cut')

    await archive.append("mail", letters, store.time)

    lines = path.read_text().splitlines()
    assert [json.loads(lines[place])["id"] for place in (0, 2)] == [str(task_id)] * 2


# Rules


def new_ids(number: int) -> list[UUID]:
    return [UUID(int=next(_numbers)) for _ in range(number)]


async def replays(store: Letters, *rules: ReplayRule, turns: int = 1) -> list[bool]:
    replaying = Replaying(store, rules, new_ids)
    leadership = await store.elected()
    return [await replaying(leadership) for _ in range(turns)]


async def replayed(store: Letters, task_id: UUID) -> int:
    (letter,) = await store.read_dead([task_id])
    return len(letter.replayed_as)


async def test_a_rule_waits_before_it_replays(store: Letters) -> None:
    rule = ReplayRule(type="send", after=10 * MINUTE)
    task_id = await store.bury()
    leadership = await store.elected()
    replaying = Replaying(store, [rule], new_ids)

    await replaying(leadership)
    assert await replayed(store, task_id) == 0
    store.time += 10 * MINUTE
    await replaying(leadership)
    await replaying(leadership)

    assert await replayed(store, task_id) == 1


async def test_a_rule_leaves_alone_what_was_due_long_ago(store: Letters) -> None:
    task_id = await store.bury()
    store.time += DAY + 11 * MINUTE

    await replays(store, ReplayRule(type="send"))

    assert await replayed(store, task_id) == 0


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_a_rule_counts_along_the_lineage(store: Letters, times: int) -> None:
    rule = ReplayRule(error_class="transient", after=timedelta(0), times=times)
    await store.bury()
    leadership = await store.elected()
    replaying = Replaying(store, [rule], new_ids)

    for _ in range(5):
        await replaying(leadership)
        if (await store.has_work(("send",), None)) is False:
            break
        await store.fail()

    assert len(await store.found()) == 1 + times


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        ({"error_class": "transient"}, True),
        ({"error_class": "code-bug"}, False),
        ({"error": "gateway"}, True),
        ({"error": "image"}, False),
        ({"queue": "mail", "type": "send"}, True),
        ({"queue": "other"}, False),
        ({"type": "other"}, False),
    ],
)
async def test_a_rule_replays_what_it_names(
    store: Letters, asked: dict[str, Any], fits: bool
) -> None:
    task_id = await store.bury()

    await replays(store, ReplayRule(**asked, after=timedelta(0)))

    assert await replayed(store, task_id) == int(fits)


async def test_rules_take_turns_and_a_broken_one_stops_no_other(
    store: Letters, caplog: pytest.LogCaptureFixture
) -> None:
    task_id = await store.bury()
    broken = ReplayRule(error="((", after=timedelta(0))
    rule = ReplayRule(queue="mail", after=timedelta(0))

    turns = await replays(store, broken, rule, turns=3)

    assert turns == [True, False, True]
    assert await replayed(store, task_id) == 1
    assert len(said(caplog, "replay.refused rule=error=((")) == 1


async def test_a_rule_goes_on_where_its_last_page_ended(
    store: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_module, "REPLAY_BATCH", 2)
    ids = [await store.bury() for _ in range(5)]

    turns = await replays(store, ReplayRule(type="send", after=timedelta(0)), turns=3)

    assert turns == [True, True, False]
    assert [await replayed(store, one) for one in ids] == [1] * 5


async def test_without_rules_nothing_is_asked() -> None:
    assert not await Replaying(MemoryStore(), [], new_ids)(Leadership(WORKER, 1))


async def test_a_leader_that_was_deposed_replays_nothing(store: Letters) -> None:
    task_id = await store.bury()
    await store.elected()
    rule = ReplayRule(type="send", after=timedelta(0))

    with pytest.raises(NotLeader):
        await Replaying(store, [rule], new_ids)(Leadership(WORKER, 7))

    assert await replayed(store, task_id) == 0
