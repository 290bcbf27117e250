/* The part of collecting that repeats with every step, without Python: engine/collect/step_loop.py explains it.
 *
 * All pointers lead to memory that Python owns and keeps: NumPy arrays, the shared block of the environments, handles of
 * CUDA. The structures have the same fields as their namesakes in step_loop.py. */

#include <sched.h>
#include <semaphore.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { STEP = 1, DONE = 2 };               /* flags of a slice, as in envs/pool/worker.py */
enum { STEPPING, ACTING, NEEDS_PYTHON };   /* states of a lane */
enum { NOT_READY = 600 };                  /* CUDA_ERROR_NOT_READY */
static const int64_t SECOND = 1000000000;
static const int64_t LONGEST_SLEEP = 2000000; /* a slice that is slower does not delay the others */
static const int64_t EPISODE_ENDED = (int64_t)1 << 32; /* as in envs/shared_block.py */

typedef struct { /* the CUDA driver's functions, or those of a test */
    int (*launch)(void *graph, void *stream);
    int (*record)(void *event, void *stream);
    int (*query)(void *event);
} Driver;

typedef struct { /* how a slice's worker is woken: Doorbell in envs/pool/signals.py */
    uint8_t *asleep;
    sem_t *semaphore;
} Bell;

typedef struct { /* a rollout slot */
    int64_t *positions;  /* [env] the step that inference acts for; n_steps where an environment is not ready */
    int64_t *outcomes;   /* [step, env] */
    float *actions;      /* [step, env, width] */
    const float *staged; /* [env, width] where inference leaves actions; NULL: in the block */
    void *graph;
} Slot;

typedef struct { /* the environments of a run */
    int64_t n_slices, n_envs, n_steps, width, at_least, stall_ns;
    const int64_t *bounds; /* [slice, 2] first and end environment */
    uint8_t *flags;        /* [slice] one every `flag_stride` bytes */
    int64_t flag_stride;
    const Bell *bells;     /* [slice] */
    int64_t *step;         /* [slice] */
    const int64_t *slot;   /* [slice] */
    const int64_t *outcomes; /* [env] of the latest step */
    float *actions;        /* [env, width] */
    const Slot *slots;
    const Driver *driver;
    void *stream, *event;
    int64_t *ready;        /* [slice] the slices that are acted for */
    int64_t *intervals;    /* [capacity, 2] when environments had stepped, and when actions were sent */
    int64_t capacity;
    int64_t first_slot;    /* acted for first */
    int64_t state, error, n_ready, n_intervals, n_acts, inference_ns, since, launched, was_split;
} Lane;

typedef struct { /* for environments, as Doorbell.wait in envs/pool/signals.py */
    uint8_t *asleep;
    sem_t *semaphore;
    int64_t spin, yields_core; /* nanoseconds before it sleeps; whether others may have the core meanwhile */
} Waiting;

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * SECOND + now.tv_nsec;
}

static void ring(const Bell *bell)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (*(volatile uint8_t *)bell->asleep)
        sem_post(bell->semaphore);
}

/* Whether Python has to handle the step of a slice: the last one of a rollout, or of an episode. */
static int is_special(const Lane *lane, int64_t slice)
{
    if (lane->step[slice] + 1 >= lane->n_steps)
        return 1;
    for (int64_t env = lane->bounds[2 * slice]; env < lane->bounds[2 * slice + 1]; env++)
        if (lane->outcomes[env] >= EPISODE_ENDED)
            return 1;
    return 0;
}

/* Start inference for the slices that have stepped, once there are enough of them. Returns whether anything happened. */
static int act(Lane *lane)
{
    int64_t n = 0, in_flight = 0, n_first = 0;
    for (int64_t slice = 0; slice < lane->n_slices; slice++) {
        uint8_t flag = __atomic_load_n(lane->flags + slice * lane->flag_stride, __ATOMIC_ACQUIRE);
        if (flag > DONE) {
            lane->state = NEEDS_PYTHON;
            return 1;
        }
        in_flight += flag != 0;
        if (flag == DONE) {
            lane->ready[n++] = slice;
            n_first += lane->slot[slice] == lane->first_slot;
        }
    }
    int64_t now = now_ns();
    int64_t at_least = lane->at_least < in_flight ? lane->at_least : in_flight;
    if (!n || (n < at_least && !lane->was_split && now - lane->since < lane->stall_ns))
        return 0;
    for (int64_t i = 0; i < n; i++)
        if (is_special(lane, lane->ready[i])) {
            lane->state = NEEDS_PYTHON;
            return 1;
        }
    lane->was_split = n_first && n_first < n; /* in two rollouts: the older one first */
    if (lane->was_split) {
        int64_t kept = 0;
        for (int64_t i = 0; i < n; i++)
            if (lane->slot[lane->ready[i]] == lane->first_slot)
                lane->ready[kept++] = lane->ready[i];
        n = kept;
    }
    const Slot *slot = lane->slots + lane->slot[lane->ready[0]];
    for (int64_t env = 0; env < lane->n_envs; env++)
        slot->positions[env] = lane->n_steps;
    for (int64_t i = 0; i < n; i++) {
        int64_t slice = lane->ready[i], step = lane->step[slice] + 1;
        for (int64_t env = lane->bounds[2 * slice]; env < lane->bounds[2 * slice + 1]; env++)
            slot->positions[env] = step;
    }
    lane->error = lane->driver->launch(slot->graph, lane->stream);
    if (!lane->error)
        lane->error = lane->driver->record(lane->event, lane->stream);
    if (lane->error) {
        lane->state = NEEDS_PYTHON;
        return 1;
    }
    for (int64_t i = 0; i < n; i++) { /* while the GPU infers */
        int64_t slice = lane->ready[i], first = lane->bounds[2 * slice], end = lane->bounds[2 * slice + 1];
        memcpy(slot->outcomes + lane->step[slice]++ * lane->n_envs + first, lane->outcomes + first,
               (end - first) * sizeof(int64_t));
    }
    lane->n_ready = n;
    lane->launched = now;
    lane->state = ACTING;
    return 1;
}

/* Send the actions if inference is done. Returns whether anything happened. */
static int send_actions(Lane *lane)
{
    int error = lane->driver->query(lane->event);
    if (error == NOT_READY)
        return 0;
    lane->error = error;
    if (error) {
        lane->state = NEEDS_PYTHON;
        return 1;
    }
    const Slot *slot = lane->slots + lane->slot[lane->ready[0]];
    for (int64_t i = 0; i < lane->n_ready; i++) {
        int64_t slice = lane->ready[i], first = lane->bounds[2 * slice];
        int64_t bytes = (lane->bounds[2 * slice + 1] - first) * lane->width * sizeof(float);
        float *actions = lane->actions + first * lane->width;
        if (slot->staged)
            memcpy(actions, slot->staged + first * lane->width, bytes);
        memcpy(slot->actions + (lane->step[slice] * lane->n_envs + first) * lane->width, actions, bytes);
        __atomic_store_n(lane->flags + slice * lane->flag_stride, STEP, __ATOMIC_RELEASE);
    }
    for (int64_t i = 0; i < lane->n_ready; i++)
        ring(lane->bells + lane->ready[i]);
    lane->since = now_ns();
    lane->n_acts++;
    lane->inference_ns += lane->since - lane->launched;
    if (lane->n_intervals < lane->capacity) {
        lane->intervals[2 * lane->n_intervals] = lane->launched;
        lane->intervals[2 * lane->n_intervals++ + 1] = lane->since;
    }
    lane->state = STEPPING;
    return 1;
}

/* One round through all lanes. Returns whether anything happened. */
static int look_at_all(Lane **lanes, int64_t n, int64_t *needs_python, int64_t *is_acting)
{
    int moved = 0;
    *is_acting = 0;
    for (int64_t i = 0; i < n; i++) {
        Lane *lane = lanes[i];
        if (lane->state == ACTING)
            moved |= send_actions(lane);
        else if (lane->state == STEPPING && !*needs_python)
            moved |= act(lane);
        *is_acting |= lane->state == ACTING;
        *needs_python |= lane->state == NEEDS_PYTHON;
    }
    return moved;
}

static void sleep_on(const Waiting *waiting, int64_t nanoseconds)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    int64_t in_all = until.tv_nsec + nanoseconds;
    until.tv_sec += in_all / SECOND;
    until.tv_nsec = in_all % SECOND;
    sem_timedwait(waiting->semaphore, &until); /* also ends early, by a signal: the caller looks again */
}

/* Step the environments of `n` lanes until one needs Python or `budget` nanoseconds have passed; with `settle`, then
 * wait for inference that has begun. */
void unidle_step(Lane **lanes, int64_t n, int64_t budget, int64_t settle, const Waiting *waiting)
{
    int64_t began = now_ns(), now = began, moved = began, needs_python = 0, is_acting = 0;
    do {
        if (look_at_all(lanes, n, &needs_python, &is_acting))
            moved = now_ns();
        else if (waiting->yields_core)
            sched_yield();
        now = now_ns();
        if (!needs_python && !is_acting && now - moved >= waiting->spin && now - began < budget) {
            /* As in signals.py: drain, set the flag, look once more, sleep. */
            while (!sem_trywait(waiting->semaphore))
                ;
            *(volatile uint8_t *)waiting->asleep = 1;
            __atomic_thread_fence(__ATOMIC_SEQ_CST);
            if (look_at_all(lanes, n, &needs_python, &is_acting))
                moved = now_ns();
            else
                sleep_on(waiting, budget - (now - began) < LONGEST_SLEEP ? budget - (now - began) : LONGEST_SLEEP);
            *(volatile uint8_t *)waiting->asleep = 0;
            now = now_ns();
        }
    } while ((settle && is_acting) || (!needs_python && now - began < budget));
}
