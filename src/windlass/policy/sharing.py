"""What a breaker has to do with the store, if processes share it: its news, and whose trials decide."""

from windlass.model.breaker import BreakerState, Trials


class Share:
    """The part of one process in a breaker that is shared.

    Ungoverned, with nobody to keep it in step with the store, a process goes by itself.
    """

    def __init__(self) -> None:
        self.is_governed = False
        self.epoch: int | None = None  # of the store, when it was looked at last
        self.news: BreakerState | None = None  # that the store does not know
        self.is_asked = False  # there is a call to try with
        self._is_ours = False
        self._theirs_until: float | None = None

    def trials(self, now: float) -> Trials:
        """Who makes the trials, for all that is known."""
        if self._is_ours or not self.is_governed:
            return Trials.OURS
        if self._theirs_until is not None and now < self._theirs_until:
            return Trials.THEIRS
        return Trials.UNDECIDED

    @property
    def has_grant(self) -> bool:
        """Whether the store has given us the trials."""
        return self._is_ours

    def govern(self, is_governed: bool) -> bool:
        """Let the store decide who tries, or nobody; return whether that is new."""
        is_new = is_governed is not self.is_governed
        if is_new:
            self.is_governed = is_governed
            self.give_up()
        return is_new

    def ask(self, now: float) -> bool:
        """Say that there is a call to try with; return whether the store is to be asked for it."""
        if self.is_asked or self.trials(now) is not Trials.UNDECIDED:
            return False
        self.is_asked = True
        return True

    def grant(self, epoch: int, *, is_ours: bool, theirs_until: float) -> None:
        """Take in what the store said; if another has the trials it need not be asked again until then.

        Not if the circuit has changed while it was asked: that was about trials which are over.
        """
        if self.epoch == epoch and self.news is None:
            self.give_up()
            self._is_ours = is_ours
            self._theirs_until = None if is_ours else theirs_until

    def give_up(self) -> None:
        """Know nothing of the trials."""
        self.is_asked = self._is_ours = False
        self._theirs_until = None

    def tell(self, state: BreakerState) -> None:
        """Keep for the store what was found out here."""
        self.news = state
        self.give_up()

    def was_told(self, epoch: int, news: BreakerState, *, is_written: bool) -> None:
        """Forget news of that epoch, unless there are others by now. Written, they are the next epoch."""
        if self.epoch != epoch:
            return
        if self.news is news:
            self.news = None
        if is_written:
            self.epoch = epoch + 1

    def follow(self, epoch: int) -> None:
        """Be where the store is: what was found out here came too late."""
        self.epoch = epoch
        self.news = None
        self.give_up()

    def forget(self) -> None:
        """Begin again: nothing is known, and there is no news."""
        self.epoch = self.news = None
        self.give_up()
