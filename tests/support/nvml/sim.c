/* A libnvidia-ml.so.1 that does what a text file says, for the unmodified pynvml.
 *
 *   gcc -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 sim.c
 *
 * FAKENVML_DEVICE, if set, names a file that stays open from Init on, as a driver keeps /dev/nvidia0.
 * FAKENVML_CTL names the file; it is read again at every call. A line is
 *
 *   <device|*> <call|*> = <value> [<value>]     what the call returns (GetSamples: µs:percent …)
 *   <device|*> <call|*> error <code>            it returns this NVML error
 *   <device|*> <call|*> hang                    it does not return while the line is there
 *   <device|*> <call|*> segv                    it crashes
 *   <device|*> <call|*> slow <microseconds>     it takes so long
 *
 * The last line that fits counts, of values and of troubles apart. A call without a value is "not
 * supported" (3). Calls are named without "nvml" and "Device", with ":KIND" where NVML has one
 * function for several values; the device of Init, GetCount, Shutdown and versions is "*". A MIG
 * instance is "0/2": of GPU 0, at position 2. Lists: GetComputeRunningProcesses = pid:bytes …,
 * GetNvLinkState = 1 1 0, GetCpuAffinity = hex words. FieldValue:<id>, and FieldValue:<id>/<link> of
 * the fields whose scope is a link, or all links (~0).
 * GPM: GpmQueryDeviceSupport = 1, then GpmMetric:<id> = the mean, or a sample of integrals,
 * GpmSample = <seconds> <id>:<integral> …, of which the mean between two is taken; of a MIG instance
 * the "device" is 0.3 for GPU instance 3.
 * -DOLD_DRIVER leaves out what drivers before 535 lack.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
typedef unsigned long long u64;

static void control(char *text, size_t size) {
    const char *path = getenv("FAKENVML_CTL");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    ssize_t length = fd >= 0 ? read(fd, text, size - 1) : 0;
    if (fd >= 0) close(fd);
    text[length > 0 ? length : 0] = 0;
}

/* A handle is GPU + 1; a MIG instance has its position + 1 above, a GPU instance's samples theirs. */
enum { POSITION = 16, GPU_INSTANCE = 32 };

static void name_of(long device, char *name, size_t size) {
    long gpu = device & 0xffff, position = (device >> POSITION) & 0xffff, part = device >> GPU_INSTANCE;
    if (device < 0) snprintf(name, size, "%ld", device);
    else if (part) snprintf(name, size, "%ld.%ld", gpu, part - 1);
    else if (position) snprintf(name, size, "%ld/%ld", gpu, position - 1);
    else snprintf(name, size, "%ld", gpu);
}

/* Find the last line for device and call whose third word is "=" (or is not); copy what follows. */
static int find(long device, const char *call, int value, char *rest, size_t size) {
    char text[65536], number[32], *line, *save = NULL;
    int found = 0;
    control(text, sizeof text);
    name_of(device, number, sizeof number);
    for (line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        char who[16], what[64], kind[16];
        int at = 0;
        if (!strstr(line, call) && !strstr(line, " * ")) continue; /* most of them */
        if (sscanf(line, "%15s %63s %15s %n", who, what, kind, &at) < 3) continue;
        if (strcmp(who, "*") && strcmp(who, number)) continue;
        if (strcmp(what, "*") && strcmp(what, call)) continue;
        if ((strcmp(kind, "=") == 0) != value) continue;
        snprintf(rest, size, "%s %s", value ? "" : kind, at ? line + at : "");
        found = 1;
    }
    return found;
}

/* Do the trouble the file asks for; return the error of the call. */
static int gate(long device, const char *call) {
    char rest[256];
    while (find(device, call, 0, rest, sizeof rest)) {
        if (!strncmp(rest, "error", 5)) return atoi(rest + 5);
        if (!strncmp(rest, "segv", 4)) *(volatile int *)0 = 1;
        if (!strncmp(rest, "slow", 4)) { usleep(atoi(rest + 4)); return 0; }
        usleep(20000); /* hang: until the line is gone */
    }
    return 0;
}

static int text_value(long device, const char *call, char *out, unsigned size) {
    char rest[4096];
    int error = gate(device, call);
    if (error) return error;
    if (!find(device, call, 1, rest, sizeof rest)) return NOT_SUPPORTED;
    snprintf(out, size, "%s", rest + strspn(rest, " "));
    return 0;
}

static int values(long device, const char *call, u64 *a, u64 *b) {
    char rest[256];
    int error = text_value(device, call, rest, sizeof rest);
    if (error) return error;
    return sscanf(rest, "%llu %llu", a, b) >= 1 ? 0 : NOT_SUPPORTED;
}

static int one(void *h, const char *call, unsigned *out) {
    u64 a = 0, b = 0;
    int error = values((long)h - 1, call, &a, &b);
    if (!error) *out = (unsigned)a;
    return error;
}

static int one64(void *h, const char *call, u64 *out) {
    u64 a = 0, b = 0;
    int error = values((long)h - 1, call, &a, &b);
    if (!error) *out = a;
    return error;
}

static int init(void) {
    const char *device = getenv("FAKENVML_DEVICE");
    if (device && open(device, O_RDONLY | O_CLOEXEC) < 0) return NOT_FOUND; /* held until exit */
    return gate(-1, "Init");
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return init(); }
int nvmlInit_v2(void) { return init(); }
int nvmlShutdown(void) { return gate(-1, "Shutdown"); }
const char *nvmlErrorString(int code) { (void)code; return "an error"; }
int nvmlSystemGetDriverVersion(char *v, unsigned n) { return text_value(-1, "DriverVersion", v, n); }
int nvmlSystemGetNVMLVersion(char *v, unsigned n) { return text_value(-1, "NVMLVersion", v, n); }
int nvmlDeviceGetCount_v2(unsigned *n) {
    u64 a = 0, b = 0;
    int error = values(-1, "GetCount", &a, &b);
    *n = (unsigned)a;
    return error;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) {
    *h = (void *)(long)(i + 1);
    return gate(i, "GetHandleByIndex");
}
int nvmlDeviceGetUUID(void *h, char *v, unsigned n) { return text_value((long)h - 1, "GetUUID", v, n); }
int nvmlDeviceGetName(void *h, char *v, unsigned n) { return text_value((long)h - 1, "GetName", v, n); }
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(void *h, struct pci *p) {
    return text_value((long)h - 1, "GetPciInfo", p->bus_id, sizeof p->bus_id);
}
int nvmlDeviceGetUtilizationRates(void *h, unsigned *u) {
    u64 a = 0, b = 0;
    int error = values((long)h - 1, "GetUtilizationRates", &a, &b);
    u[0] = (unsigned)a;
    u[1] = (unsigned)b;
    return error;
}
int nvmlDeviceGetMemoryInfo(void *h, u64 *m) { /* total, free, used; the file says used, total */
    u64 used = 0, total = 0;
    int error = values((long)h - 1, "GetMemoryInfo", &used, &total);
    if (!error) { m[0] = total; m[1] = total - used; m[2] = used; }
    return error;
}
int nvmlDeviceGetPowerUsage(void *h, unsigned *v) { return one(h, "GetPowerUsage", v); }
int nvmlDeviceGetEnforcedPowerLimit(void *h, unsigned *v) { return one(h, "GetEnforcedPowerLimit", v); }
int nvmlDeviceGetTotalEnergyConsumption(void *h, u64 *v) {
    return one64(h, "GetTotalEnergyConsumption", v);
}
int nvmlDeviceGetTemperature(void *h, int s, unsigned *v) { (void)s; return one(h, "GetTemperature", v); }
int nvmlDeviceGetClockInfo(void *h, int kind, unsigned *v) {
    return one(h, kind == 1 ? "GetClockInfo:SM" : "GetClockInfo:MEM", v);
}
int nvmlDeviceGetMaxClockInfo(void *h, int kind, unsigned *v) {
    (void)kind;
    return one(h, "GetMaxClockInfo:SM", v);
}
#ifndef OLD_DRIVER
int nvmlDeviceGetCurrentClocksEventReasons(void *h, u64 *v) {
    return one64(h, "GetCurrentClocksEventReasons", v);
}
int nvmlDeviceGetPcieReplayCounter(void *h, unsigned *v) { return one(h, "GetPcieReplayCounter", v); }
#endif
int nvmlDeviceGetCurrentClocksThrottleReasons(void *h, u64 *v) {
    return one64(h, "GetCurrentClocksThrottleReasons", v);
}
int nvmlDeviceGetViolationStatus(void *h, int policy, u64 *v) { /* reference time, violation time */
    v[0] = 0;
    static const char *const names[] = {"POWER", "THERMAL", "SYNC_BOOST", "BOARD_LIMIT", "LOW", "RELIABILITY"};
    char call[64];
    snprintf(call, sizeof call, "GetViolationStatus:%s", policy >= 0 && policy < 6 ? names[policy] : "OTHER");
    return one64(h, call, v + 1);
}
int nvmlDeviceGetPcieThroughput(void *h, int counter, unsigned *v) {
    return one(h, counter == 0 ? "GetPcieThroughput:TX" : "GetPcieThroughput:RX", v);
}
int nvmlDeviceGetCurrPcieLinkGeneration(void *h, unsigned *v) {
    return one(h, "GetCurrPcieLinkGeneration", v);
}
int nvmlDeviceGetCurrPcieLinkWidth(void *h, unsigned *v) { return one(h, "GetCurrPcieLinkWidth", v); }
int nvmlDeviceGetTotalEccErrors(void *h, int kind, int counter, u64 *v) {
    (void)counter;
    return one64(h, kind == 0 ? "GetTotalEccErrors:CORRECTED" : "GetTotalEccErrors:UNCORRECTED", v);
}
struct process { unsigned pid; u64 bytes; unsigned gpu_instance, compute_instance; };
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *count, struct process *infos) {
    char rest[4096], *word, *save = NULL;
    unsigned n = 0, room = *count;
    int error = text_value((long)h - 1, "GetComputeRunningProcesses", rest, sizeof rest);
    if (error) return error;
    for (word = strtok_r(rest, " ", &save); word; word = strtok_r(NULL, " ", &save), n++) {
        struct process one = {0, 0, ~0u, ~0u};
        if (sscanf(word, "%u:%llu", &one.pid, &one.bytes) < 1) return NOT_SUPPORTED;
        if (infos && n < room) infos[n] = one;
    }
    *count = n;
    return room < n ? INSUFFICIENT_SIZE : 0;
}
struct sample { u64 t_us; union { double d; unsigned u; u64 ull; } value; };
int nvmlDeviceGetSamples(void *h, int kind, u64 after, int *type, unsigned *count, struct sample *out) {
    char rest[4096], *word, *save = NULL;
    unsigned n = 0;
    int error = text_value((long)h - 1, "GetSamples", rest, sizeof rest);
    if (error) return error;
    (void)kind;
    *type = 1; /* unsigned int */
    for (word = strtok_r(rest, " ", &save); word; word = strtok_r(NULL, " ", &save)) {
        u64 t_us;
        unsigned percent;
        if (sscanf(word, "%llu:%u", &t_us, &percent) != 2 || t_us <= after) continue;
        if (out && n < *count) { out[n].t_us = t_us; out[n].value.u = percent; }
        n++;
    }
    *count = n;
    return n ? 0 : NOT_FOUND;
}
int nvmlSystemGetCudaDriverVersion(int *v) {
    u64 a = 0, b = 0;
    int error = values(-1, "CudaVersion", &a, &b);
    *v = (int)a;
    return error;
}
int nvmlDeviceGetMaxPcieLinkGeneration(void *h, unsigned *v) {
    return one(h, "GetMaxPcieLinkGeneration", v);
}
int nvmlDeviceGetMaxPcieLinkWidth(void *h, unsigned *v) { return one(h, "GetMaxPcieLinkWidth", v); }
int nvmlDeviceGetPersistenceMode(void *h, unsigned *v) { return one(h, "GetPersistenceMode", v); }
int nvmlDeviceGetPowerManagementDefaultLimit(void *h, unsigned *v) {
    return one(h, "GetPowerManagementDefaultLimit", v);
}
static int two(void *h, const char *call, unsigned *v, unsigned *w) {
    u64 a = 0, b = 0;
    int error = values((long)h - 1, call, &a, &b);
    if (!error) { *v = (unsigned)a; *w = (unsigned)b; }
    return error;
}
int nvmlDeviceGetPowerManagementLimitConstraints(void *h, unsigned *least, unsigned *most) {
    return two(h, "GetPowerManagementLimitConstraints", least, most);
}
int nvmlDeviceGetEccMode(void *h, unsigned *now, unsigned *next) { return two(h, "GetEccMode", now, next); }
int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *next) { return two(h, "GetMigMode", now, next); }
int nvmlDeviceGetCudaComputeCapability(void *h, unsigned *major, unsigned *minor) {
    return two(h, "GetCudaComputeCapability", major, minor);
}
static int words(void *h, const char *call, unsigned size, u64 *set) {
    char rest[4096], *word, *save = NULL;
    unsigned n = 0;
    int error = text_value((long)h - 1, call, rest, sizeof rest);
    if (error) return error;
    memset(set, 0, size * sizeof *set);
    for (word = strtok_r(rest, " ", &save); word; word = strtok_r(NULL, " ", &save), n++) {
        if (n >= size) return INSUFFICIENT_SIZE;
        set[n] = strtoull(word, NULL, 16);
    }
    return 0;
}
int nvmlDeviceGetCpuAffinity(void *h, unsigned size, u64 *set) {
    return words(h, "GetCpuAffinity", size, set);
}
int nvmlDeviceGetMemoryAffinity(void *h, unsigned size, u64 *set, unsigned scope) {
    (void)scope;
    return words(h, "GetMemoryAffinity", size, set);
}
int nvmlDeviceGetRemappedRows(void *h, unsigned *a, unsigned *b, unsigned *c, unsigned *d) {
    char rest[256];
    int error = text_value((long)h - 1, "GetRemappedRows", rest, sizeof rest);
    if (error) return error;
    return sscanf(rest, "%u %u %u %u", a, b, c, d) == 4 ? 0 : NOT_SUPPORTED;
}
int nvmlDeviceGetRetiredPages(void *h, int cause, unsigned *count, u64 *addresses) {
    unsigned n = 0, room = *count;
    int error = one(h, cause ? "GetRetiredPages:DOUBLE" : "GetRetiredPages:SINGLE", &n);
    if (error) return error;
    *count = n;
    if (room < n) return INSUFFICIENT_SIZE;
    if (addresses) memset(addresses, 0, n * sizeof *addresses);
    return 0;
}
int nvmlDeviceGetRetiredPagesPendingStatus(void *h, unsigned *v) {
    return one(h, "GetRetiredPagesPendingStatus", v);
}
/* The word of a link in the list that the file has for this call. */
static int of_link(void *h, const char *call, unsigned link, char *out, unsigned size) {
    char rest[4096], *word, *save = NULL;
    unsigned n = 0;
    int error = text_value((long)h - 1, call, rest, sizeof rest);
    if (error) return error;
    for (word = strtok_r(rest, " ", &save); word; word = strtok_r(NULL, " ", &save), n++)
        if (n == link) { snprintf(out, size, "%s", word); return 0; }
    return INVALID;
}
static int number_of_link(void *h, const char *call, unsigned link, unsigned *v) {
    char word[32];
    int error = of_link(h, call, link, word, sizeof word);
    if (!error) *v = (unsigned)atoi(word);
    return error;
}
int nvmlDeviceGetNvLinkState(void *h, unsigned link, unsigned *up) {
    return number_of_link(h, "GetNvLinkState", link, up);
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void *h, unsigned link, unsigned *kind) {
    return number_of_link(h, "GetNvLinkRemoteDeviceType", link, kind);
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *h, unsigned link, struct pci *p) {
    return of_link(h, "GetNvLinkRemotePciInfo", link, p->bus_id, sizeof p->bus_id);
}
struct field { unsigned id, scope; long long t, latency; int type, error; u64 value; };
int nvmlDeviceGetFieldValues(void *h, int count, struct field *fields) {
    int error = gate((long)h - 1, "GetFieldValues");
    for (int at = 0; at < count && !error; at++) {
        unsigned id = fields[at].id, scope = fields[at].scope;
        int of_links = (id >= 161 && id <= 168) || (id >= 201 && id <= 222); /* scope: a link */
        int of_all = (id >= 138 && id <= 141) || (id >= 201 && id <= 222);   /* ~0: all links */
        char call[32];
        snprintf(call, sizeof call, of_links && scope != ~0u ? "FieldValue:%u/%u" : "FieldValue:%u", id, scope);
        fields[at].type = 3; /* unsigned long long */
        fields[at].error = one64(h, call, &fields[at].value);
        if (scope == ~0u ? !of_all : of_all && !of_links) fields[at].error = INVALID;
    }
    return error;
}
int nvmlDeviceGetMaxMigDeviceCount(void *h, unsigned *v) { return one(h, "GetMaxMigDeviceCount", v); }
int nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned position, void **out) {
    long device = ((long)h - 1) | ((long)(position + 1) << POSITION);
    char rest[256];
    int error = gate((long)h - 1, "GetMigDeviceHandleByIndex");
    *out = (void *)(device + 1);
    if (error) return error;
    return find(device, "GetUUID", 1, rest, sizeof rest) ? 0 : NOT_FOUND;
}
int nvmlDeviceGetGpuInstanceId(void *h, unsigned *v) { return one(h, "GetGpuInstanceId", v); }
int nvmlDeviceGetComputeInstanceId(void *h, unsigned *v) { return one(h, "GetComputeInstanceId", v); }
struct attributes { unsigned multiprocessors, others[7]; u64 megabytes; };
int nvmlDeviceGetAttributes_v2(void *h, struct attributes *a) {
    memset(a, 0, sizeof *a);
    return one(h, "GetAttributes", &a->multiprocessors);
}
struct support { unsigned version, supported; };
int nvmlGpmQueryDeviceSupport(void *h, struct support *s) {
    return one(h, "GpmQueryDeviceSupport", &s->supported);
}
struct taken { long device; char text[1024]; };
int nvmlGpmSampleAlloc(struct taken **out) { return (*out = calloc(1, sizeof **out)) ? 0 : INVALID; }
int nvmlGpmSampleFree(struct taken *sample) { free(sample); return 0; }
static int gpm_sample(long device, struct taken *sample) {
    int error = gate(device, "GpmSampleGet");
    sample->device = device;
    sample->text[0] = 0;
    if (!error) find(device, "GpmSample", 1, sample->text, sizeof sample->text);
    return error;
}
int nvmlGpmSampleGet(void *h, struct taken *sample) { return gpm_sample((long)h - 1, sample); }
int nvmlGpmMigSampleGet(void *h, unsigned gpu_instance, struct taken *sample) {
    return gpm_sample(((long)h - 1) | ((long)(gpu_instance + 1) << GPU_INSTANCE), sample);
}
static int integral(const struct taken *sample, unsigned id, double *t, double *value) {
    char copy[1024], *word, *save = NULL;
    int found = 0;
    snprintf(copy, sizeof copy, "%s", sample->text);
    *t = strtod(copy, NULL);
    for (word = strtok_r(copy, " ", &save); word; word = strtok_r(NULL, " ", &save)) {
        unsigned other;
        if (sscanf(word, "%u:%lf", &other, value) == 2 && other == id) { found = 1; break; }
    }
    return found;
}
struct metric { unsigned id; int error; double value; const char *names[3]; };
struct metrics { unsigned version, count; struct taken *from, *to; struct metric metrics[64]; };
int nvmlGpmMetricsGet(struct metrics *m) {
    int error = gate(m->to->device, "GpmMetricsGet");
    for (unsigned at = 0; at < m->count && !error; at++) {
        struct metric *one = &m->metrics[at];
        char call[32], rest[256];
        double from = 0, to = 0, from_s = 0, to_s = 0;
        snprintf(call, sizeof call, "GpmMetric:%u", one->id);
        one->error = 0;
        if (find(m->to->device, call, 1, rest, sizeof rest)) {
            one->value = strtod(rest, NULL);
        } else if (!integral(m->from, one->id, &from_s, &from) || !integral(m->to, one->id, &to_s, &to)) {
            one->error = NOT_SUPPORTED;
        } else if (to_s <= from_s) {
            one->error = INVALID; /* samples in the wrong order */
        } else {
            one->value = (to - from) / (to_s - from_s);
        }
    }
    return error;
}
