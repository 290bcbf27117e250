/* A fake NVML driver with two GPUs: GPU 0 has every reading, GPU 1 only a few.

   FAKE_NVML: "not loaded" (the driver), "none" (no GPU), "lost" (GPU 0 falls off the bus at the fourth poll), "quiet" (no
   process has run a kernel recently), "silent" (it returns no samples, and no error), "gpu 0" and "gpu 1" (used by
   the process whose id is in the file gpu.pid). -DOLD omits what old drivers do not export. */
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NOT_LOADED = 9, LOST = 15 };
enum { SAMPLE_US = 50000, KEPT = 100 };

typedef union { double d; unsigned ui; unsigned long long ull; } Value;
typedef struct { unsigned long long at; Value value; } Sample;
typedef struct { unsigned id, scope; int64_t at, latency; unsigned type; int rc; Value value; } Field;
typedef struct { unsigned pid; unsigned long long memory; unsigned gi, ci; } Process;
typedef struct { unsigned pid; unsigned long long at; unsigned sm, mem, enc, dec; } ProcessUse;
typedef struct { unsigned id; int rc; double value; char *names[3]; } Metric;
typedef struct { unsigned version, n; void *first, *second; Metric metrics[]; } Metrics;

static int polls[2];
static long long began;

static long long now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}
static int mode(const char *name) { const char *m = getenv("FAKE_NVML"); return m && !strcmp(m, name); }
static int gpu(void *handle) { return (int)(intptr_t)handle - 1; }
static int lost(void *handle) { return mode("lost") && gpu(handle) == 0 && polls[0] >= 3; }
#define ON(handle) do { if (lost(handle)) return LOST; } while (0)
#define FIRST_ONLY(handle) do { ON(handle); if (gpu(handle)) return NOT_SUPPORTED; } while (0)

int nvmlInitWithFlags(unsigned flags) { began = now_us(); return mode("not loaded") ? NOT_LOADED : OK; }
int nvmlShutdown(void) { return OK; }
int nvmlSystemGetDriverVersion(char *version, unsigned size) { snprintf(version, size, "550.54"); return OK; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 12040; return OK; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = mode("none") ? 0 : 2; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **handle) { *handle = (void *)(intptr_t)(i + 1); return OK; }
int nvmlDeviceGetName(void *h, char *name, unsigned size) {
  snprintf(name, size, gpu(h) ? "Fake Small" : "Fake Large");
  return OK;
}
int nvmlDeviceGetUUID(void *h, char *uuid, unsigned size) {
  if (mode("lost")) return NOT_SUPPORTED; /* recordings number GPUs in the order of their UUID calls */
  snprintf(uuid, size, gpu(h) ? "GPU-22222222-2222-2222-2222-222222222222" : "GPU-11111111-1111-1111-1111-111111111111");
  return OK;
}
int nvmlDeviceGetMemoryInfo(void *h, unsigned long long *m) { /* total, free, used */
  ON(h);
  m[0] = 8ULL << 30, m[1] = 6ULL << 30, m[2] = 2ULL << 30;
  return OK;
}
int nvmlDeviceGetUtilizationRates(void *h, unsigned *shares) { /* the same for four polls of two calls each */
  ON(h);
  static int asked[2];
  shares[0] = 10 * (1 + asked[gpu(h)]++ / 8), shares[1] = 5;
  return OK;
}
int nvmlDeviceGetTemperature(void *h, unsigned sensor, unsigned *t) { ON(h); polls[gpu(h)]++; *t = 41; return OK; }
int nvmlDeviceGetClockInfo(void *h, unsigned kind, unsigned *mhz) { ON(h); *mhz = kind == 1 ? 1500 : 2600; return OK; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *h, unsigned long long *mask) {
  FIRST_ONLY(h);
  *mask = 0x1 | 0x4 | 0x20; /* idle, power limit, heat */
  return OK;
}
int nvmlDeviceGetEnforcedPowerLimit(void *h, unsigned *mw) { FIRST_ONLY(h); *mw = 700000; return OK; }
int nvmlDeviceGetPowerUsage(void *h, unsigned *mw) { FIRST_ONLY(h); *mw = 350000; return OK; }

#ifndef OLD
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, Process *found) {
  ON(h);
  if (!found) { *n = 1; return TOO_SMALL; }
  *n = 1;
  unsigned pid = 4242;
  FILE *file = mode(gpu(h) ? "gpu 1" : "gpu 0") ? fopen("gpu.pid", "r") : NULL;
  if (file) {
    if (fscanf(file, "%u", &pid) != 1) pid = 4242;
    fclose(file);
  }
  found[0] = (Process){pid, gpu(h) ? ~0ULL : 1ULL << 30, 0, 0}; /* all ones: not known */
  return OK;
}
int nvmlDeviceGetSamples(void *h, unsigned kind, unsigned long long last, unsigned *type, unsigned *n, Sample *found) {
  FIRST_ONLY(h);
  long long made = (now_us() - began) / SAMPLE_US + 3; /* three are older than the first poll */
  unsigned count = 0;
  if (mode("silent")) return NOT_FOUND;
  for (long long k = made > KEPT ? made - KEPT : 0; k < made; k++) {
    unsigned long long at = began + (k - 2) * SAMPLE_US;
    if (at <= last) continue;
    if (found && count >= *n) break;
    if (found) { found[count].at = at; found[count].value.ui = kind == 1 ? k % 101 : 7; }
    count++;
  }
  *type = 1, *n = count;
  return count ? OK : NOT_FOUND;
}
int nvmlDeviceGetFieldValues(void *h, int n, Field *fields) {
  ON(h);
  for (int i = 0; i < n; i++) {
    fields[i].rc = gpu(h) ? NOT_SUPPORTED : OK, fields[i].type = 1;
    fields[i].value.ui = 210000; /* constant instantaneous power */
  }
  return OK;
}
int nvmlDeviceGetTotalEnergyConsumption(void *h, unsigned long long *mj) {
  FIRST_ONLY(h);
  static const int steps[] = {0, 0, 25, 25, 60, -1}; /* joules since the start; -1: the counter was reset */
  static unsigned asked;
  unsigned last = sizeof steps / sizeof *steps - 1, at = asked++ < last ? asked - 1 : last;
  *mj = steps[at] < 0 ? 5000 : 1000000 + 1000ULL * steps[at];
  return OK;
}
int nvmlDeviceGetProcessUtilization(void *h, ProcessUse *found, unsigned *n, unsigned long long last) {
  FIRST_ONLY(h);
  if (mode("quiet")) { *n = 0; return OK; }
  if (!found) { *n = 2; return TOO_SMALL; }
  found[0] = (ProcessUse){4242, last + 2000, 63, 1, 0, 0}, found[1] = (ProcessUse){4242, last + 1000, 11, 1, 0, 0};
  *n = 2;
  return OK;
}
int nvmlGpmQueryDeviceSupport(void *h, unsigned *support) { ON(h); support[1] = gpu(h) == 0; return OK; }
int nvmlGpmSampleAlloc(void **s) { *s = calloc(1, sizeof(long long)); return OK; }
int nvmlGpmSampleFree(void *s) { free(s); return OK; }
int nvmlGpmSampleGet(void *h, long long *s) { /* as with driver 580, concurrent calls crash the process */
  static atomic_int inside;
  FIRST_ONLY(h);
  if (atomic_fetch_add(&inside, 1)) raise(SIGSEGV);
  *s = now_us();
  usleep(2000);
  atomic_fetch_sub(&inside, 1);
  return OK;
}
int nvmlGpmMetricsGet(Metrics *m) {
  long long passed = *(long long *)m->second - *(long long *)m->first;
  if (passed <= 0) return INVALID;
  for (unsigned i = 0; i < m->n; i++) {
    Metric *x = &m->metrics[i];
    x->rc = x->id == 10 ? NOT_SUPPORTED : OK;                         /* no DRAM counter */
    x->value = passed < 95000 ? 0 : x->id == 2 ? 31.5 : 12.5; /* 0 if sampled too often */
  }
  return OK;
}
#endif
