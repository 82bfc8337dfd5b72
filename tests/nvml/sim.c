/* A libnvidia-ml.so.1 that does what a text file says, for the unmodified pynvml.
 *
 *   gcc -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 sim.c
 *
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
 * function for several values; the device of Init, GetCount, Shutdown and versions is "*".
 * -DOLD_DRIVER leaves out what drivers before 535 lack.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
typedef unsigned long long u64;

static void control(char *text, size_t size) {
    const char *path = getenv("FAKENVML_CTL");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    ssize_t length = fd >= 0 ? read(fd, text, size - 1) : 0;
    if (fd >= 0) close(fd);
    text[length > 0 ? length : 0] = 0;
}

/* Find the last line for device and call whose third word is "=" (or is not); copy what follows. */
static int find(long device, const char *call, int value, char *rest, size_t size) {
    char text[16384], number[16], *line, *save = NULL;
    int found = 0;
    control(text, sizeof text);
    snprintf(number, sizeof number, "%ld", device);
    for (line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        char who[16], what[64], kind[16];
        int at = 0;
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

int nvmlInitWithFlags(unsigned flags) { (void)flags; return gate(-1, "Init"); }
int nvmlInit_v2(void) { return gate(-1, "Init"); }
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
    return one64(h, policy == 0 ? "GetViolationStatus:POWER" : "GetViolationStatus:THERMAL", v + 1);
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
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *count, void *infos) {
    unsigned n = 0;
    int error = one(h, "GetComputeRunningProcesses", &n);
    unsigned room = *count;
    if (error) return error;
    *count = n;
    if (room < n) return INSUFFICIENT_SIZE;
    if (infos) memset(infos, 0, n * 24ul);
    return 0;
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
