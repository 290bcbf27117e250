"""Fills rollouts from host environments, serving whichever slices of them are ready first.

A slice takes T steps in rollout k, then T in rollout k + 1, and so on, without waiting for the others: all it needs is
that the next rollout is open, which is to say that the weights to act with in it are there. How far ahead that reaches
is the number of lanes (see lane.py). What is acted and noted depends on seed and weights alone, not on which slice was
ready when.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unidle.algos.capturing import Capturer, as_it_is
from unidle.algos.registry import AnyPolicy
from unidle.buffers.rollout import Rollout
from unidle.engine.collect.action_log import EpisodeLog, as_arrays, as_tensors
from unidle.engine.collect.inference import PageLock, Where
from unidle.engine.collect.rollout_slot import Lane
from unidle.engine.evaluate.play import Stopped
from unidle.envs.protocol import Fault, HostEnvs
from unidle.envs.shared_block import EPISODE_ENDED
from unidle.errors import TrainingError
from unidle.timeline import ENVIRONMENT, INFERENCE, STORAGE, Timeline

_STALL_SECONDS = 0.002  # then those that are ready are served, be they few: nobody waits for a slow one
QUICK_SECONDS = 600e-6  # for a step of a slice: four times what a service of a small network takes on a CPU


@dataclass
class _Boundary:
    """Where every environment stood when it had its last step of the latest finished rollout behind it."""

    obs: np.ndarray
    starts: np.ndarray  # the row is the first of its episode
    episode: np.ndarray
    states: Tensor  # recurrent


class _OnStream:
    """What is launched inside goes to this stream. Torch's own context takes longer: it asks where it comes from."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._before = stream and torch.cuda.current_stream(stream.device)

    def __enter__(self) -> None:
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            torch.cuda.set_stream(self._before)


class Collector:
    """Acts in the environments and keeps what happened, rollout after rollout."""

    def __init__(
        self,
        envs: HostEnvs,
        policy: AnyPolicy,
        rollouts: Sequence[Rollout],
        seed: int,
        timeline: Timeline,
        capture: Capturer = as_it_is,
        on_fault: Callable[[Fault, int], None] = lambda fault, rollout: None,
    ) -> None:
        """One lane per rollout; with more than one, each acts with a copy of `policy`.

        `on_fault` hears of each fault, and of the number of the rollout that it counts to.
        """
        self.envs, self.policy = envs, policy
        self._seed, self._timeline, self._on_fault = seed, timeline, on_fault
        self._device = rollouts[0].obs.device
        self._steps, n_envs = rollouts[0].shape
        on_gpu = self._device.type == "cuda"
        # Inference goes ahead of learning on the GPU: environments wait for it.
        self._stream = torch.cuda.Stream(self._device, priority=-1) if on_gpu else None
        self._on_stream = _OnStream(self._stream)
        self._page_lock = PageLock(envs.block) if on_gpu else None
        self._state = torch.zeros(n_envs, policy.state_size, device=self._device)
        with self._on_stream:
            self._wait_for_learner()
            self._lanes = [
                Lane(policy, rollout, envs.block, self._state, capture, own_weights=len(rollouts) > 1)
                for rollout in rollouts
            ]
        self._at_least = _worth_a_service(envs, on_gpu=on_gpu)
        self._lines = [np.arange(first, end) for first, end in envs.bounds]
        self._number = [0] * len(envs.bounds)  # of the rollout that each slice is in
        self._done = np.zeros(len(envs.bounds), np.int64)  # steps in it that each slice has behind it
        self._slice_of = np.repeat(np.arange(len(envs.bounds)), np.diff(envs.bounds)[:, 0])  # of each line
        self._latest: tuple[list[int], np.ndarray] = [], np.zeros(0, np.int64)  # slices, and their lines
        self._again: dict[int, np.ndarray] = {}  # slices of which only these lines take their step, once more
        self._waiting: list[int] = []  # slices whose observations wait for actions
        self._parked = list(range(len(envs.bounds)))  # slices whose next rollout is not open yet
        self._unnoted: list[tuple[Lane, Where]] = []  # steps whose outcomes are in the block only
        self._in_flight = 0
        self._opened = -1  # the highest rollout that is open
        self.until: float = float("inf")  # no environment acts in this rollout or a later one
        self.is_broken_off = False  # what is being collected is not wanted any more
        self.number = 0  # of the rollout to be finished next
        # The observation in the block is the first of its episode; after a start kept up for recurrent policies alone.
        self._begins = np.ones(n_envs, np.bool_)
        self._anew: defaultdict[int, list[int]] = defaultdict(list)  # rollout → lines that a fault made begin it anew
        self.log = EpisodeLog(n_envs, rollouts[0].actions.shape[2])
        self.recent_returns: deque[float] = deque(maxlen=100)
        self.recent_lengths: deque[int] = deque(maxlen=100)
        self.recent_successes: deque[bool] = deque(maxlen=100)  # of environments that tell
        self.episodes = 0
        self.faults: Counter[str] = Counter()  # kind → how many, in the rollouts that are finished
        self._faults_in: defaultdict[int, Counter[str]] = defaultdict(Counter)  # the same of each one in the making

    def close(self) -> None:
        """End all environments."""
        try:
            if self._page_lock is not None:
                torch.cuda.synchronize(self._device)  # nothing may still read from the block
                self._page_lock.close()
        finally:
            self.envs.close()

    def start(self) -> None:
        """Begin episode 0 everywhere, and open as many rollouts as there are lanes."""
        self.envs.start(np.zeros(self.envs.n_envs, np.int64))
        self._boundary = self._stand()
        for _ in self._lanes:
            self.open()

    # -- the way of a slice through its rollouts -----------------------------------------------------------------------

    @property
    def ahead(self) -> int:
        """How many rollouts may be open at once."""
        return len(self._lanes)

    def open(self) -> None:
        """Let the next rollout be acted in, with the policy's weights as they are now."""
        self._opened += 1
        with self._on_stream:
            self._wait_for_learner()
            self._lane(self._opened).open(len(self.envs.bounds), self._seed, self._opened)
        parked, self._parked = self._parked, []
        self._queue(parked)

    def turn(self, seconds: float = _STALL_SECONDS) -> bool:
        """Serve what waits, and take in what is ready within `seconds`; False if no environment can go on."""
        envs, timeline = self.envs, self._timeline
        if self._waiting:
            timeline.enter(INFERENCE)
            # One lane at a time, the older rollout first: it is the one that learning waits for.
            number = min(self._number[slot] for slot in self._waiting)
            slices = [slot for slot in self._waiting if self._number[slot] == number]
            self._waiting = [slot for slot in self._waiting if self._number[slot] != number]
            self._serve(self._lane(number), slices)
            if self._waiting:
                seconds = 0.0
        else:
            timeline.enter(STORAGE)
            self._note_all()
        if not self._in_flight:
            return False
        timeline.enter(ENVIRONMENT)
        try:
            stepped = envs.recv(min(self._at_least, self._in_flight), seconds)
        except TrainingError:
            self._tell_faults()  # the one too many among them
            raise
        timeline.enter(STORAGE)
        self._in_flight -= len(stepped)
        if envs.faults or envs.restarted or self._again:
            self._take_in_with_care(stepped)
        else:
            self._take_in(stepped)
        return True

    def finish(self) -> Lane:
        """Go on until the oldest open rollout is whole; returns its lane, ready to be learned from.

        Raises Stopped if it is broken off before: a checkpoint is then of the rollout before it.
        """
        lane = self._lane(self.number)
        while lane.unfinished:
            if self.is_broken_off:
                raise Stopped
            self.turn()
        return self._hand_over(lane)

    def request_counts(self) -> dict[str, int]:
        """What became of the requests that environments made, by kind."""
        return self.envs.block.request_counts()

    def settle(self) -> None:
        """Nothing is left to take in: the host saw every episode end."""

    def _lane(self, number: int) -> Lane:
        return self._lanes[number % len(self._lanes)]

    def _wait_for_learner(self) -> None:
        """Let the collector's stream go on after what the learner's has been told so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(self._device))

    # -- one step of some slices ---------------------------------------------------------------------------------------

    def _where(self, slices: list[int]) -> Where:
        """[step, environment] of each slice's current observation."""
        if not self._again:  # plain views where they will do: quicker than to gather and scatter
            step = int(self._done[slices[0]])
            if len(slices) == 1:
                return step, slice(*self.envs.bounds[slices[0]])
            if len(slices) == len(self._lines) and (self._done == step).all():
                return step, slice(0, self.envs.n_envs)
            if slices != self._latest[0]:  # mostly those are served that have just been taken in
                self._latest = slices, np.concatenate([self._lines[number] for number in slices])
            lines = self._latest[1]
        else:
            lines = np.concatenate([self._again.get(number, self._lines[number]) for number in slices])
        return self._done[self._slice_of[lines]], lines

    def _serve(self, lane: Lane, slices: list[int]) -> None:
        """Give these slices their actions; what they brought is noted while the GPU infers, if it can do without."""
        where, timeline = self._where(slices), self._timeline
        if self.policy.state_size:
            self._note_all()  # it says whose episode begins
        with self._on_stream:
            lane.service.launch(where, self._begins if self.policy.state_size else None)
        timeline.enter(STORAGE)
        self._note_all()
        timeline.enter(INFERENCE)
        lane.service.wait(where)
        if self._stream is not None:
            timeline.worked(INFERENCE, lane.service.device_ns)
        self.envs.send(slices)
        self._in_flight += len(slices)
        lane.notes.actions[where] = self.envs.block.actions[where[1]]  # they are read there now, and not written

    def _take_in(self, slices: list[int]) -> None:
        """One more step is behind these slices; what it brought is yet to be noted."""
        for lane in range(len(self._lanes)):
            of_lane = [number for number in slices if self._number[number] % len(self._lanes) == lane]
            if of_lane:
                self._unnoted.append((self._lanes[lane], self._where(of_lane)))
        self._go_on(slices)

    def _note_all(self) -> None:
        """Note what steps have brought: always before slices are sent on, or the environments are asked anything."""
        for lane, where in self._unnoted:
            self._note(lane, where)
        self._unnoted.clear()

    def _note(self, lane: Lane, where: Where) -> None:
        block, notes, lines = self.envs.block, lane.notes, where[1]
        outcomes = block.step_words[lines]
        notes.outcomes[where] = outcomes
        ended = outcomes >= EPISODE_ENDED
        if self.policy.state_size:
            self._begins[lines] = ended
        if np.count_nonzero(ended):
            envs, truncated = np.arange(self.envs.n_envs)[lines], block.truncated[lines]
            at = np.broadcast_to(where[0], ended.shape) * self.envs.n_envs + envs
            notes.final_obs.append(block.final_obs[envs[truncated]])
            notes.final_at.append(at[truncated])
            ended &= block.episode_length[lines] >= 0  # less than 0: cut off by a fault, no result of the policy's
            told = (block.episode_return, block.episode_length, block.episode_success)
            notes.episodes.append(np.stack([at[ended], *(of_all[envs[ended]] for of_all in told)]))

    def _go_on(self, slices: list[int]) -> None:
        """One more step is behind these slices."""
        self._done[slices] += 1
        if self._done.max() == self._steps:
            for number in np.flatnonzero(self._done == self._steps).tolist():
                self._finish_slice(number)
        self._queue(slices)

    def _queue(self, slices: list[int]) -> None:
        """Let these slices wait for their actions, or for their rollout to open."""
        last = min(self._opened, self.until - 1)
        for number in slices:
            (self._waiting if self._number[number] <= last else self._parked).append(number)

    def _finish_slice(self, number: int) -> None:
        """All steps in a rollout are behind this slice."""
        block, lane, lines = self.envs.block, self._lane(self._number[number]), slice(*self.envs.bounds[number])
        lane.notes.last_obs[lines] = block.obs[lines]
        lane.notes.last_episode[lines] = block.episode[lines]
        if self.policy.state_size:
            with self._on_stream:
                lane.last_states[lines] = self._state[lines]
        lane.unfinished -= 1
        self._number[number] += 1
        self._done[number] = 0

    def _hand_over(self, lane: Lane) -> Lane:
        """The rollout is whole."""
        self._note_all()
        notes = lane.notes
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        starts = self._boundary.starts.copy()
        starts[self._anew.pop(self.number, [])] = True
        notes.hand_over(lane.rollout, starts)
        lane.rollout.states[-1].copy_(lane.last_states)
        for env in np.flatnonzero(starts):
            self.log.restart(int(env))  # usually begun anew already, but not after a fault
        self.log.extend(notes.actions, notes.starts[1:])
        self._boundary = _Boundary(
            notes.last_obs.copy(), notes.starts[-1].copy(), notes.last_episode.copy(), lane.rollout.states[-1].clone()
        )
        returns, lengths, successes = notes.finished_episodes()
        self.episodes += len(returns)
        self.recent_returns.extend(returns)
        self.recent_lengths.extend(lengths)
        self.recent_successes.extend(successes)
        self.faults.update(self._faults_in.pop(self.number, Counter()))
        self.number += 1
        return lane

    # -- faults --------------------------------------------------------------------------------------------------------

    def _take_in_with_care(self, slices: list[int]) -> None:
        """Like `_take_in`, where some steps did not happen: those are taken once more, from a new episode's start."""
        block = self.envs.block
        self._note_all()
        self._tell_faults()
        for line in self.envs.restarted:
            self._renew(line)
        self.envs.restarted.clear()
        for number in slices:
            lane, step = self._lane(self._number[number]), int(self._done[number])
            lines = self._again.pop(number, self._lines[number])
            block.skip[self._lines[number]] = False
            failed = block.retry[lines]
            if not failed.all():
                self._note(lane, (np.full((~failed).sum(), step), lines[~failed]))
            if failed.any():
                for line in lines[failed]:
                    self._cut(lane, step, line)
                self._again[number] = lines[failed]
                block.skip[self._lines[number]] = True
                block.skip[lines[failed]] = False
                self._waiting.append(number)
            else:
                self._go_on([number])

    def _rollout_of(self, fault: Fault) -> int:
        """The rollout that a fault counts to; an exception to its environment's, so that no clock decides it."""
        if fault.kind != "exception":
            return self.number
        number = self._number[self._slice_of[fault.env]]
        return int(min(number, self._opened, self.until - 1))  # one that is yet to be whole

    def _tell_faults(self) -> None:
        for fault in self.envs.faults:
            rollout = self._rollout_of(fault)
            self._faults_in[rollout][fault.kind] += 1
            self._on_fault(fault, rollout)
        self.envs.faults.clear()

    def _cut(self, lane: Lane, step: int, line: int) -> None:
        """The step of `line` did not happen: its trajectory ends, truncated, with the one before."""
        rollout = lane.rollout
        if self._stream is not None:
            self._stream.synchronize()  # rare, so plainly
        self._truncate(line, step - 1, rollout.obs[step, line].cpu().numpy())
        if self.policy.state_size:
            with self._on_stream:
                self._state[line] = rollout.states[step, line]

    def _renew(self, line: int) -> None:
        """An environment had to begin a new episode while it waited: its trajectory ends with the last step noted."""
        number = int(self._slice_of[line])
        step = int(self._done[number]) - 1
        if number in self._again and line not in self._again[number]:
            step += 1  # it waited for others of its slice, its own step noted already
        self._truncate(line, step, self.envs.block.final_obs[line])

    def _truncate(self, line: int, step: int, final_row: np.ndarray) -> None:
        """The trajectory of `line` ends with this step of the rollout that it is in.

        If that is −1, there is nothing to cut off: the end of the rollout before is worth what its last observation is
        worth anyway.
        """
        number = self._number[self._slice_of[line]]
        self._begins[line] = True
        if step < 0:
            self._anew[number].append(line)
            return
        notes = self._lane(number).notes
        if not (notes.terminated[step, line] or notes.truncated[step, line]):
            notes.truncated[step, line] = True
            notes.final_obs.append(final_row[np.newaxis].copy())
            notes.final_at.append(np.array([step * self.envs.n_envs + line]))

    # -- what a checkpoint holds ---------------------------------------------------------------------------------------

    def _stand(self) -> _Boundary:
        """Where the environments stand now."""
        block = self.envs.block
        return _Boundary(block.obs.copy(), self._begins.copy(), block.episode.copy(), self._state.clone())

    def state_dict(self) -> dict[str, Any]:
        """Where each environment stood at the end of the latest finished rollout, and what it acts with from there."""
        self._note_all()  # before a worker may be found dead, and others' last observations are written in its lines
        boundary, n_envs = self._boundary, self.envs.n_envs
        still = len(self._parked) + len(self._waiting) == len(self._lines) and not self._done.any() and not self._again
        at_boundary = still and all(number == self.number for number in self._number)
        own = self.envs.states() if at_boundary else [None] * n_envs
        self._take_in_with_care([])  # a worker may have been found dead
        # One whose worker died since has begun another episode: the one that was open there is replayed.
        left = self.envs.block.episode != boundary.episode
        own = [None if is_left else state for state, is_left in zip(own, left)]
        return {
            "number": self.number,
            "episode": torch.from_numpy(boundary.episode),
            "obs": torch.from_numpy(boundary.obs),
            "starts": torch.from_numpy(boundary.starts),
            "states": boundary.states.cpu(),
            "actions": [torch.from_numpy(self.log.actions(env)) for env in range(n_envs)],
            "env_states": [_savable(state) for state in own],
            # Of every open rollout but the last, which is acted in with the learner's own.
            "weights": [self._lane(n).policy.state_dict() for n in range(self.number, self._opened)],
            "recent_returns": list(self.recent_returns),
            "recent_lengths": list(self.recent_lengths),
            "recent_successes": list(self.recent_successes),
            "episodes": self.episodes,
            "faults": dict(self.faults),
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Bring every environment back to where it stood; returns those whose episode had to start anew.

        The policy must have its weights already.
        """
        actions = [piece.numpy() for piece in state["actions"]]
        env_states = [as_arrays(part) for part in state["env_states"]]
        points = list(zip(state["episode"].tolist(), actions, state["obs"].numpy(), env_states))
        repeated = self.envs.resume(points)
        lost = [env for env, same in enumerate(repeated) if not same]
        self._begins[:] = state["starts"].numpy()
        self._begins[lost] = True
        self._state.copy_(state["states"])
        for env in range(self.envs.n_envs):
            self.log.restart(env, None if env in lost else actions[env])
        self.recent_returns.extend(state["recent_returns"])
        self.recent_lengths.extend(state["recent_lengths"])
        self.recent_successes.extend(state.get("recent_successes", ()))
        self.episodes = state["episodes"]
        self.faults.update(state["faults"])
        self._boundary = self._stand()
        self.number = state["number"]
        self._number = [self.number] * len(self._lines)
        self._opened = self.number - 1
        for _ in self._lanes:
            self.open()
        for lane, weights in enumerate(state["weights"], self.number):
            with self._on_stream:
                self._lane(lane).load(weights)
        return lost


def _worth_a_service(envs: HostEnvs, *, on_gpu: bool) -> int:
    """How many slices must be ready for a service.

    A quarter of them: some are stepped while others are served. But a service on the CPU takes the time of many quick
    steps and, being for all environments at once, no less for a few: then it waits for all.
    """
    slices = len(envs.bounds)
    seconds = envs.env_spec.step_seconds * envs.n_envs / slices
    return slices if not on_gpu and seconds < QUICK_SECONDS else max(1, slices // 4)


def _savable(state: dict[str, Any] | None) -> Any:
    """An environment's state for the checkpoint; None, so that the episode is replayed, if it is not all data."""
    try:
        return as_tensors(state)
    except TypeError:
        return None
