/* A cable between TAP interfaces: a learning switch with configurable faults of its links.
 *
 *     cable FD...            one descriptor of a TAP interface per port
 *
 * A frame from port i to port j goes up link i and down link j. Each direction of a link is one
 * server with a bounded queue: it drops by chance, drops what finds the queue full, sends at its
 * rate, and delivers after the delay and a random part of the jitter, never out of order.
 *
 * Orders come on stdin, one per line; the cable ends when stdin does, so it cannot outlive the
 * process that started it:
 *
 *     set PORT RATE_BITS_PER_S DELAY_NS JITTER_NS LOSS_PER_MILLION QUEUE_BYTES
 *     count                                          answered with one line of JSON
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { PORTS = 8, MACS = 64, FRAME_BYTES = 65536, READS_IN_A_ROW = 32 };

typedef struct frame {
    struct frame *next;
    int64_t due_ns;
    int bytes;
    unsigned char data[];
} frame_t;

typedef struct {
    frame_t *first, **last;
    int64_t rate_bits; /* 0 = that of the port */
    int64_t free_ns, latest_ns; /* when the line is free again; when the last frame comes out */
    uint64_t frames, bytes, lost, overflowed, queued_bytes_at_most;
} way_t;

typedef struct {
    int tap;
    int64_t rate_bits, delay_ns, jitter_ns, loss_ppm, queue_bytes;
    way_t up, down;
    int largest;
} port_t;

static port_t ports[PORTS];
static int port_count;
static struct { unsigned char mac[6]; int port; } macs[MACS];
static int mac_count;
static uint64_t dice = 0x9e3779b97f4a7c15u;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static uint64_t roll(void) { /* xorshift64*: the same losses in every run that sends the same */
    dice ^= dice >> 12, dice ^= dice << 25, dice ^= dice >> 27;
    return (dice * 0x2545f4914f6cdd1du) >> 16;
}

/* A frame enters one direction of a link at `at_ns`; it is freed when it does not get through. */
static void enter(port_t *port, way_t *way, frame_t *frame, int64_t at_ns) {
    if (port->loss_ppm && (int64_t)(roll() % 1000000) < port->loss_ppm) {
        way->lost++;
        free(frame);
        return;
    }
    int64_t start = way->free_ns > at_ns ? way->free_ns : at_ns;
    int64_t rate_bits = way->rate_bits ? way->rate_bits : port->rate_bits;
    if (rate_bits) {
        uint64_t queued = (uint64_t)((start - at_ns) * (rate_bits / 8e9));
        if (queued + frame->bytes > (uint64_t)port->queue_bytes) {
            way->overflowed++;
            free(frame);
            return;
        }
        if (queued + frame->bytes > way->queued_bytes_at_most)
            way->queued_bytes_at_most = queued + frame->bytes;
        start += (int64_t)(frame->bytes * 8e9 / rate_bits);
    }
    way->free_ns = start;
    frame->due_ns = start + port->delay_ns;
    if (port->jitter_ns) frame->due_ns += (int64_t)(roll() % (uint64_t)port->jitter_ns);
    if (frame->due_ns < way->latest_ns) frame->due_ns = way->latest_ns;
    way->latest_ns = frame->due_ns;
    way->frames++, way->bytes += frame->bytes;
    frame->next = NULL;
    *way->last = frame;
    way->last = &frame->next;
}

static frame_t *leave(way_t *way) {
    frame_t *frame = way->first;
    way->first = frame->next;
    if (!way->first) way->last = &way->first;
    return frame;
}

static int port_of(const unsigned char *mac) {
    for (int i = 0; i < mac_count; i++)
        if (!memcmp(macs[i].mac, mac, 6)) return macs[i].port;
    return -1;
}

static void route(int from, frame_t *frame) {
    int64_t at_ns = frame->due_ns;
    if (port_of(frame->data + 6) < 0 && mac_count < MACS) {
        memcpy(macs[mac_count].mac, frame->data + 6, 6);
        macs[mac_count++].port = from;
    }
    int to = port_of(frame->data); /* unknown or for all: to everybody else */
    for (int i = 0; i < port_count; i++) {
        if (i == from || (to >= 0 && to != i)) continue;
        frame_t *copy = malloc(sizeof(frame_t) + frame->bytes);
        if (!copy) continue;
        copy->bytes = frame->bytes;
        memcpy(copy->data, frame->data, frame->bytes);
        enter(&ports[i], &ports[i].down, copy, at_ns);
    }
    free(frame);
}

static int take(port_t *port) {
    static unsigned char buffer[FRAME_BYTES];
    int bytes = (int)read(port->tap, buffer, sizeof buffer);
    if (bytes < 14) return 0;
    frame_t *frame = malloc(sizeof(frame_t) + bytes);
    if (!frame) return 0;
    frame->bytes = bytes;
    memcpy(frame->data, buffer, bytes);
    if (bytes > port->largest) port->largest = bytes;
    enter(port, &port->up, frame, now_ns());
    return 1;
}

/* Move everything that is due; return when the next frame is, or -1. */
static int64_t deliver(void) {
    int64_t now = now_ns(), next = -1;
    for (int i = 0; i < port_count; i++)
        while (ports[i].up.first && ports[i].up.first->due_ns <= now) route(i, leave(&ports[i].up));
    for (int i = 0; i < port_count; i++) {
        way_t *ways[2] = {&ports[i].up, &ports[i].down};
        while (ways[1]->first && ways[1]->first->due_ns <= now) {
            frame_t *frame = leave(ways[1]);
            if (write(ports[i].tap, frame->data, frame->bytes) < 0) { /* the interface is down */ }
            free(frame);
        }
        for (int w = 0; w < 2; w++)
            if (ways[w]->first && (next < 0 || ways[w]->first->due_ns < next))
                next = ways[w]->first->due_ns;
    }
    return next;
}

static void say_way(const char *name, const way_t *way) {
    printf("\"%s\":{\"frames\":%lu,\"bytes\":%lu,\"lost\":%lu,\"overflowed\":%lu,"
           "\"queued_bytes_at_most\":%lu}",
           name, way->frames, way->bytes, way->lost, way->overflowed, way->queued_bytes_at_most);
}

static void say_counts(int real_time) {
    printf("{\"real_time\":%s,\"ports\":[", real_time ? "true" : "false");
    for (int i = 0; i < port_count; i++) {
        printf("%s{\"largest_frame_bytes\":%d,", i ? "," : "", ports[i].largest);
        say_way("up", &ports[i].up);
        putchar(',');
        say_way("down", &ports[i].down);
        putchar('}');
    }
    printf("]}\n");
    fflush(stdout);
}

static int obey(int real_time) {
    static char text[4096];
    static size_t filled;
    ssize_t bytes = read(0, text + filled, sizeof text - 1 - filled);
    if (bytes <= 0) return 0;
    text[filled += bytes] = 0;
    for (char *end; (end = strchr(text, '\n'));) {
        int port;
        long rate, delay, jitter, loss, queue;
        *end = 0;
        if (sscanf(text, "set %d %ld %ld %ld %ld %ld", &port, &rate, &delay, &jitter, &loss,
                   &queue) == 6 && port >= 0 && port < port_count) {
            ports[port].rate_bits = rate, ports[port].delay_ns = delay;
            ports[port].jitter_ns = jitter, ports[port].loss_ppm = loss;
            ports[port].queue_bytes = queue;
        } else if (sscanf(text, "down %d %ld", &port, &rate) == 2 && port >= 0 &&
                   port < port_count) {
            ports[port].down.rate_bits = rate;
        } else if (!strcmp(text, "count")) {
            say_counts(real_time);
        }
        filled -= end + 1 - text;
        memmove(text, end + 1, filled + 1);
    }
    return 1;
}

int main(int count, char **words) {
    for (int i = 1; i < count && port_count < PORTS; i++) {
        port_t *port = &ports[port_count++];
        port->tap = atoi(words[i]);
        port->up.last = &port->up.first, port->down.last = &port->down.first;
        fcntl(port->tap, F_SETFL, O_NONBLOCK);
    }
    /* A busy node must not slow the network down. Where this is refused, `count` says so. */
    struct sched_param priority = {.sched_priority = 10};
    int real_time = sched_setscheduler(0, SCHED_FIFO, &priority) == 0;
    mlockall(MCL_CURRENT | MCL_FUTURE);
    struct pollfd watched[PORTS + 1] = {{.fd = 0, .events = POLLIN}};
    for (int i = 0; i < port_count; i++)
        watched[i + 1] = (struct pollfd){.fd = ports[i].tap, .events = POLLIN};
    for (;;) {
        int64_t next = deliver();
        struct timespec wait = {0}, *patience = next < 0 ? NULL : &wait;
        if (next >= 0) {
            int64_t ns = next - now_ns();
            if (ns < 0) ns = 0;
            wait = (struct timespec){ns / 1000000000, ns % 1000000000};
        }
        if (ppoll(watched, port_count + 1, patience, NULL) < 0 && errno != EINTR) return 1;
        if (watched[0].revents && !obey(real_time)) return 0;
        for (int i = 0; i < port_count; i++)
            if (watched[i + 1].revents & POLLIN)
                for (int n = 0; n < READS_IN_A_ROW && take(&ports[i]); n++) {}
    }
}
