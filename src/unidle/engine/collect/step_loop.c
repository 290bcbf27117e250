/* The part of collecting that repeats with every step, without Python: engine/collect/step_loop.py explains it.
 *
 * All pointers lead to memory that Python owns and keeps: NumPy arrays, the shared block of the environments, handles of
 * CUDA. The structures have the same fields in the same order as their namesakes in step_loop.py. */

#include <sched.h>
#include <semaphore.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { STEP = 1, DONE = 2 };               /* flags of a slice, as in envs/pool/worker.py */
enum { STEPPING, ACTING, NEEDS_PYTHON };   /* states of a run */
enum { NOT_READY = 600 };                  /* CUDA_ERROR_NOT_READY */
static const int64_t SECOND = 1000000000;
static const int64_t LONGEST_SLEEP = 2000000; /* _STALL_SECONDS in host.py: then the ready slices are acted for */
static const int64_t EPISODE_ENDED = (int64_t)1 << 32; /* as in envs/shared_block.py */

typedef struct { /* the CUDA driver's functions, or those of a test */
    int (*launch)(void *graph, void *stream);
    int (*record)(void *event, void *stream);
    int (*query)(void *event);
} Driver;

typedef struct { /* how a slice's worker is woken: Doorbell in envs/pool/signals.py */
    uint8_t *asleep;
    sem_t *semaphore;
} WakeUp;

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
    const WakeUp *wake_ups;     /* [slice] */
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
} Run;

typedef struct { /* for environments, as Doorbell.wait in envs/pool/signals.py */
    uint8_t *asleep;
    sem_t *semaphore;
    int64_t spin, yields_core; /* nanoseconds before it sleeps; whether others may have the core meanwhile */
    int64_t progressed_at;     /* when anything happened last; kept from call to call */
} Waiting;

/* For a check that step_loop.py declares the same structure. */
int64_t unidle_run_bytes(void)
{
    return sizeof(Run);
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * SECOND + now.tv_nsec;
}

static void ring(const WakeUp *wake_up)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (*(volatile uint8_t *)wake_up->asleep)
        sem_post(wake_up->semaphore);
}

/* Whether Python has to handle the step of a slice: the last one of a rollout, or of an episode. */
static int needs_python_for(const Run *run, int64_t slice)
{
    if (run->step[slice] + 1 >= run->n_steps)
        return 1;
    for (int64_t env = run->bounds[2 * slice]; env < run->bounds[2 * slice + 1]; env++)
        if (run->outcomes[env] >= EPISODE_ENDED)
            return 1;
    return 0;
}

/* Start inference for the slices that have stepped, once there are enough of them. Returns whether anything happened. */
static int act(Run *run)
{
    int64_t n = 0, in_flight = 0, n_first = 0;
    for (int64_t slice = 0; slice < run->n_slices; slice++) {
        uint8_t flag = __atomic_load_n(run->flags + slice * run->flag_stride, __ATOMIC_ACQUIRE);
        if (flag > DONE) {
            run->state = NEEDS_PYTHON;
            return 1;
        }
        in_flight += flag != 0;
        if (flag == DONE) {
            run->ready[n++] = slice;
            n_first += run->slot[slice] == run->first_slot;
        }
    }
    int64_t now = now_ns();
    int64_t at_least = run->at_least < in_flight ? run->at_least : in_flight;
    if (!n || (n < at_least && !run->was_split && now - run->since < run->stall_ns))
        return 0;
    for (int64_t i = 0; i < n; i++)
        if (needs_python_for(run, run->ready[i])) {
            run->state = NEEDS_PYTHON;
            return 1;
        }
    run->was_split = n_first && n_first < n; /* in two rollouts: the older one first */
    if (run->was_split) {
        int64_t kept = 0;
        for (int64_t i = 0; i < n; i++)
            if (run->slot[run->ready[i]] == run->first_slot)
                run->ready[kept++] = run->ready[i];
        n = kept;
    }
    const Slot *slot = run->slots + run->slot[run->ready[0]];
    for (int64_t env = 0; env < run->n_envs; env++)
        slot->positions[env] = run->n_steps;
    for (int64_t i = 0; i < n; i++) {
        int64_t slice = run->ready[i], step = run->step[slice] + 1;
        for (int64_t env = run->bounds[2 * slice]; env < run->bounds[2 * slice + 1]; env++)
            slot->positions[env] = step;
    }
    run->error = run->driver->launch(slot->graph, run->stream);
    if (!run->error)
        run->error = run->driver->record(run->event, run->stream);
    if (run->error) {
        run->state = NEEDS_PYTHON;
        return 1;
    }
    for (int64_t i = 0; i < n; i++) { /* while the GPU infers */
        int64_t slice = run->ready[i], first = run->bounds[2 * slice], end = run->bounds[2 * slice + 1];
        memcpy(slot->outcomes + run->step[slice]++ * run->n_envs + first, run->outcomes + first,
               (end - first) * sizeof(int64_t));
    }
    run->n_ready = n;
    run->launched = now;
    run->state = ACTING;
    return 1;
}

/* Send the actions if inference is done. Returns whether anything happened. */
static int send_actions(Run *run)
{
    int error = run->driver->query(run->event);
    if (error == NOT_READY)
        return 0;
    run->error = error;
    if (error) {
        run->state = NEEDS_PYTHON;
        return 1;
    }
    const Slot *slot = run->slots + run->slot[run->ready[0]];
    for (int64_t i = 0; i < run->n_ready; i++) {
        int64_t slice = run->ready[i], first = run->bounds[2 * slice];
        int64_t bytes = (run->bounds[2 * slice + 1] - first) * run->width * sizeof(float);
        float *actions = run->actions + first * run->width;
        if (slot->staged)
            memcpy(actions, slot->staged + first * run->width, bytes);
        memcpy(slot->actions + (run->step[slice] * run->n_envs + first) * run->width, actions, bytes);
        __atomic_store_n(run->flags + slice * run->flag_stride, STEP, __ATOMIC_RELEASE);
    }
    for (int64_t i = 0; i < run->n_ready; i++)
        ring(run->wake_ups + run->ready[i]);
    run->since = now_ns();
    run->n_acts++;
    run->inference_ns += run->since - run->launched;
    if (run->n_intervals < run->capacity) {
        run->intervals[2 * run->n_intervals] = run->launched;
        run->intervals[2 * run->n_intervals++ + 1] = run->since;
    }
    run->state = STEPPING;
    return 1;
}

/* One round through all runs. Returns whether anything happened. */
static int poll_all(Run **runs, int64_t n, int64_t *needs_python, int64_t *is_acting)
{
    int progressed = 0;
    *is_acting = 0;
    for (int64_t i = 0; i < n; i++) {
        Run *run = runs[i];
        if (run->state == ACTING)
            progressed |= send_actions(run);
        else if (run->state == STEPPING && !*needs_python)
            progressed |= act(run);
        *is_acting |= run->state == ACTING;
        *needs_python |= run->state == NEEDS_PYTHON;
    }
    return progressed;
}

static void sleep_on(const Waiting *waiting, int64_t nanoseconds)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    int64_t in_all = until.tv_nsec + (nanoseconds < LONGEST_SLEEP ? nanoseconds : LONGEST_SLEEP);
    until.tv_sec += in_all / SECOND;
    until.tv_nsec = in_all % SECOND;
    sem_timedwait(waiting->semaphore, &until); /* also ends early, by a signal: the caller looks again */
}

/* Step the environments of `n` runs until one needs Python or `budget` nanoseconds have passed; then, with
 * `wait_for_inference`, wait for inference that has begun. */
void unidle_step(Run **runs, int64_t n, int64_t budget, int64_t wait_for_inference, Waiting *waiting)
{
    int64_t began = now_ns(), now = began, needs_python = 0, is_acting = 0;
    do {
        if (poll_all(runs, n, &needs_python, &is_acting))
            waiting->progressed_at = now_ns();
        else if (waiting->yields_core)
            sched_yield();
        now = now_ns();
        if (!needs_python && !is_acting && now - waiting->progressed_at >= waiting->spin && now - began < budget) {
            /* As in signals.py: drain, set the flag, look once more, sleep. */
            while (!sem_trywait(waiting->semaphore))
                ;
            *(volatile uint8_t *)waiting->asleep = 1;
            __atomic_thread_fence(__ATOMIC_SEQ_CST);
            if (poll_all(runs, n, &needs_python, &is_acting))
                waiting->progressed_at = now_ns();
            else
                sleep_on(waiting, budget - (now - began));
            *(volatile uint8_t *)waiting->asleep = 0;
            now = now_ns();
        }
    } while ((wait_for_inference && is_acting) || (!needs_python && now - began < budget));
}
