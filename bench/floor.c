/* The floor under one sample: the same kernel files, descriptors held, read with pread.
 *
 *     floor MODE      MODE: raw | parse
 *
 * stdin: a path per line, an empty line, then any number of lines with a number of samples and, if
 * they are not to be back to back, the nanoseconds from one to the next; stdout: for each of those
 * lines the CPU time of one sample (user + system) in nanoseconds. (One process for all of them: a
 * new one each time would be reported by programs that look for new processes.)
 *
 * A sample reads every file once, as a reader that wants whole files must: on to the end when a
 * reading fills its page almost. `parse` also turns every number in it into an integer. Compiled by
 * sample_cost.py and recorder_cost.py when they run.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MOST_FILES 4096
#define BUFFER_BYTES (1 << 20)
#define SURELY_WHOLE (4096 - 512)

static int files[MOST_FILES];
static char buffer[BUFFER_BYTES];
static volatile unsigned long long kept; /* so that the compiler cannot leave the parsing out */

static void parse(const char *text, ssize_t length) {
    unsigned long long number = 0, sum = 0;
    for (const char *at = text; at < text + length; at++) {
        unsigned digit = (unsigned char)*at - '0';
        if (digit < 10) {
            number = 10 * number + digit;
        } else if (number) {
            sum ^= number;
            number = 0;
        }
    }
    kept ^= sum;
}

static void sample(int count, int parsing) {
    for (int n = 0; n < count; n++) {
        ssize_t length = pread(files[n], buffer, 8192, 0), more = length;
        while (more > 0 && length > SURELY_WHOLE && length < BUFFER_BYTES - 8192) {
            more = pread(files[n], buffer + length, 8192, length);
            if (more > 0) length += more;
        }
        if (parsing && length > 0) parse(buffer, length);
    }
}

static void until(struct timespec *at, long long period_ns) {
    long long next = at->tv_nsec + period_ns;
    at->tv_sec += next / 1000000000LL;
    at->tv_nsec = next % 1000000000LL;
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, at, NULL)) {}
}

int main(int argc, char **argv) {
    char path[4096];
    int count = 0, parsing;
    struct timespec began, ended;
    if (argc != 2) return 2;
    parsing = strcmp(argv[1], "parse") == 0;
    while (count < MOST_FILES && fgets(path, sizeof path, stdin)) {
        path[strcspn(path, "\n")] = 0;
        if (!path[0]) break;
        files[count] = open(path, O_RDONLY | O_CLOEXEC);
        if (files[count] < 0) { perror(path); return 1; }
        count++;
    }
    while (fgets(path, sizeof path, stdin)) {
        int samples = 0;
        long long spent_ns, period_ns = 0;
        struct timespec at;
        sscanf(path, "%d %lld", &samples, &period_ns);
        if (samples < 1) return 2;
        sample(count, parsing); /* the first one fills caches, as in the other programs */
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &began);
        clock_gettime(CLOCK_MONOTONIC, &at);
        for (int n = 0; n < samples; n++) {
            if (period_ns) until(&at, period_ns);
            sample(count, parsing);
        }
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ended);
        spent_ns = (ended.tv_sec - began.tv_sec) * 1000000000LL + ended.tv_nsec - began.tv_nsec;
        printf("%lld\n", spent_ns / samples);
        fflush(stdout);
    }
    return 0;
}
