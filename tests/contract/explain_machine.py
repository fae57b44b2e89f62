"""Puts both stores into any state, and checks that what is explained is what a claim then does."""

from datetime import timedelta
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import rule

from contract.machine_values import LEASE, QUEUES, TICK, TYPES, workers
from contract.store_machine import StoreMachine, Subject
from windlass.model.explanation import Behind, Explanation
from windlass.model.rule import STRICT, LaneRule, RuleScope
from windlass.model.task import ClaimRequest, TaskState
from windlass.policy.explaining import explained

AGEING = timedelta(seconds=6)
ALL = 10_000

names = st.one_of(
    st.tuples(st.just(RuleScope.QUEUE), st.sampled_from(QUEUES)),
    st.tuples(st.just(RuleScope.TYPE), st.sampled_from(TYPES)),
)
concurrencies = st.sampled_from([None, 1, 2, 3, 5])
rates = st.sampled_from([(None, None), (None, None), (0.1, 1.0), (0.5, 3.0), (20.0, 2.0)])


class ExplainMachine(StoreMachine):
    """The commands of a store, limits and pauses, and a look before each claim of everything."""

    @rule(
        name=names,
        concurrency=concurrencies,
        rate=rates,
        ageing=st.sampled_from([None, None, 0.0, 1.0, STRICT]),
        is_set=st.sampled_from([True, True, True, False]),
    )
    def limit(
        self,
        name: tuple[RuleScope, str],
        concurrency: int | None,
        rate: tuple[float | None, float | None],
        ageing: float | None,
        is_set: bool,
    ) -> None:
        if not is_set:
            self.same(lambda store: store.reset_rule(*name))
            return
        step = ageing if name[0] is RuleScope.QUEUE else None
        changed = LaneRule(*name, concurrency, *rate, step)
        self.same(lambda store: store.set_rule(changed))

    @rule(worker_id=workers, alone=st.sampled_from([False, False, True]))
    def explain_and_claim(self, worker_id: UUID, alone: bool) -> None:
        self.move_clock(TICK)
        self._answer_calls()  # as whoever asks does first
        live = {task_id: self._explained(task_id) for task_id in self._kept()}
        suspects = {task_id for task_id in live if self.model._tasks[task_id].recoveries >= 2}
        said = {
            task_id
            for task_id, told in live.items()
            if told.claimable and (task_id in suspects) is alone
        }

        self.move_clock(-TICK)  # a claim moves it by as much
        request = ClaimRequest(worker_id, TYPES, ALL, LEASE, AGEING, alone=alone)
        granted = {held.task.id for held in self._claim(request)}

        assert said == granted

    def _kept(self) -> list[UUID]:
        return [task_id for task_id in self.known if task_id in self.model._tasks]

    def _explained(self, task_id: UUID) -> Explanation:
        """What both say of a task, who differ in nothing but what somebody guesses."""
        model, subject = self.both(lambda store: store.situation(task_id, ageing=AGEING))
        told, same = explained(model), explained(subject)
        assert (told.summary, told.has_worker) == (same.summary, same.has_worker)
        assert _comparable(told) == _comparable(same)
        if told.status in (TaskState.CLAIMED, TaskState.RUNNING):
            assert not told.claimable
        return told


def _comparable(told: Explanation) -> list[object]:
    """The reasons without an estimate, and without parts of a second."""
    return [
        (reason.tasks, reason.or_more) if isinstance(reason, Behind) else reason.kind
        for reason in told.reasons
    ]


def explain_machine_for(subject: Subject) -> type[ExplainMachine]:
    """Return the machine that compares this subject with the model."""
    return type("ExplainMachineForSubject", (ExplainMachine,), {"subject": subject})
