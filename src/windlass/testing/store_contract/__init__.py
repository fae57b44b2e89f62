"""The rules every store keeps, as tests: subclass `StoreContract` to put an adapter through them.

```python
class TestMyStore(StoreContract):
    capabilities = frozenset({"wakeups"})

    async def open_store(self) -> Store: ...
    async def close_store(self, store: Store) -> None: ...
    async def advance(self, store: Store, delta: timedelta) -> None: ...
```
"""

from windlass.testing.store_contract.breaker import BreakerRules
from windlass.testing.store_contract.claim import AloneRules, ClaimRules, StartRules
from windlass.testing.store_contract.dead import (
    DiscardRules,
    FindDeadRules,
    OutdatedRules,
    ReplayRules,
)
from windlass.testing.store_contract.enqueue import EnqueueRules
from windlass.testing.store_contract.expire import ExpireRules
from windlass.testing.store_contract.explain import ExplainRules
from windlass.testing.store_contract.explain_gate import ExplainGateRules
from windlass.testing.store_contract.fail import CallbackRules, RetryLimitRules
from windlass.testing.store_contract.gate import (
    GateRules,
    HeldKeyRules,
    OrderingKeyRules,
)
from windlass.testing.store_contract.lead import ChoreRules, LeadRules, RetentionRules
from windlass.testing.store_contract.operate import CancelRules, ChangeRules, RetryRules
from windlass.testing.store_contract.order import OrderRules
from windlass.testing.store_contract.pulse import BesideRules, PulseRules, WakeRules
from windlass.testing.store_contract.read import HasWorkRules, ReadRules
from windlass.testing.store_contract.rescue import PromoteRules, RescueRules
from windlass.testing.store_contract.rule import (
    AgeingRules,
    DeclaredRules,
    LimitRules,
    PausedTypeRules,
    RateRules,
)
from windlass.testing.store_contract.schedule import FireRules, ScheduleRules
from windlass.testing.store_contract.settle import SettleRules
from windlass.testing.store_contract.unknown import UnknownTypeRules
from windlass.testing.store_contract.value import (
    ValueLimitRules,
    ValueRateRules,
    ValueRuleRules,
)
from windlass.testing.store_contract.window import DebounceRules, WindowRules


class StoreContract(
    EnqueueRules,
    WindowRules,
    DebounceRules,
    ClaimRules,
    AloneRules,
    StartRules,
    SettleRules,
    RetryLimitRules,
    CallbackRules,
    ExpireRules,
    UnknownTypeRules,
    PulseRules,
    OrderRules,
    CancelRules,
    ChangeRules,
    RetryRules,
    FindDeadRules,
    ReplayRules,
    DiscardRules,
    OutdatedRules,
    RescueRules,
    PromoteRules,
    LeadRules,
    ChoreRules,
    RetentionRules,
    ReadRules,
    HasWorkRules,
    ExplainRules,
    ExplainGateRules,
    WakeRules,
    BesideRules,
    BreakerRules,
    LimitRules,
    RateRules,
    DeclaredRules,
    AgeingRules,
    PausedTypeRules,
    OrderingKeyRules,
    HeldKeyRules,
    ValueLimitRules,
    ValueRateRules,
    ValueRuleRules,
    GateRules,
    ScheduleRules,
    FireRules,
):
    """Every rule of a store; the retention of a store under test is the default one.

    Capabilities: `wakeups` (`listen` is told of new work by the store itself) and
    `concurrent_writers` (calls at the same time neither fail nor overlap).
    """
