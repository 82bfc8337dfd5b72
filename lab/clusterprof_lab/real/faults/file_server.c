/* A file server with a chosen delay: a file system of made-up bytes over /dev/fuse. What is
 * written is counted and forgotten.
 *
 *     file_server MOUNTED LOG NAME=VALUE...
 *
 *     records=BYTES        size of the file `records`; 0 = there is none
 *     files=N bytes=BYTES  so many small files, named 000000 and on
 *     meta=NS read=NS      each lookup, open and getattr takes so long; each read
 *     sync=NS              each fsync takes so long
 *     jitter=PPM           and up to this part of it more
 *     rate=BYTES           per second, of all reads and writes together; 0 = no limit
 *     slots=N              requests under way at once, the others queue; 0 = all
 *
 * It says "ready" when mounted, unmounts and ends when stdin ends. A request that was held back gets
 * lines in LOG: for its time in the queue, and for its time in the server. Nothing is cached, so that
 * every open and every read of the job is a request. Time stands in CLOCK_MONOTONIC.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { RECORDS = 2, OWN = 4, OWN_FILES = 12, FIRST = 16, MOST_SLOTS = 256, READ_BYTES = 1 << 20, PAGES = 256 };

typedef struct answer {
    struct answer *next;
    int64_t asked_ns, begun_ns, due_ns;
    const char *what;
    struct fuse_out_header head;
    const void *body; /* of made-up bytes, or behind this */
    char own[];
} answer_t;

static int64_t records, files, small_bytes, meta_ns, read_ns, sync_ns, jitter_ppm, rate, slots;
static int64_t slot_free_ns[MOST_SLOTS], line_free_ns;
static uint64_t dice = 0x9e3779b97f4a7c15u;
static char made_up[READ_BYTES], request[READ_BYTES + 4096];
static struct { char name[64]; int64_t size; } own[OWN_FILES]; /* files that the job made */
static answer_t *first;
static int fuse;
static FILE *logged;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static uint64_t roll(void) {
    dice ^= dice >> 12, dice ^= dice << 25, dice ^= dice >> 27;
    return (dice * 0x2545f4914f6cdd1du) >> 16;
}

static int meta_operation(const char *what) {
    return !strcmp(what, "lookup") || !strcmp(what, "getattr") || !strcmp(what, "open");
}

static void send_now(answer_t *answer) {
    size_t bytes = answer->head.len - sizeof answer->head;
    struct iovec parts[2] = {{&answer->head, sizeof answer->head}, {(void *)answer->body, bytes}};
    if (writev(fuse, parts, 2) < 0) { /* the process that asked is gone */ }
    if (answer->due_ns > answer->asked_ns) {
        int64_t end_ns = now_ns();
        if (answer->begun_ns > answer->asked_ns)
            fprintf(logged, "{\"start_ns\": %ld, \"end_ns\": %ld, \"cause\": "
                    "\"storage-client-queue\", \"operation\": \"%s\"}\n",
                    answer->asked_ns, answer->begun_ns, answer->what);
        fprintf(logged, "{\"start_ns\": %ld, \"end_ns\": %ld, \"cause\": \"%s\", "
                "\"operation\": \"%s\"}\n", answer->begun_ns, end_ns,
                meta_operation(answer->what) ? "storage-metadata" : "storage-remote",
                answer->what);
    }
    free(answer);
}

/* Hold an answer back for as long as its request takes; 0 = no request that costs anything. */
static void hold(answer_t *answer, int64_t takes_ns, size_t line_bytes) {
    int slot = 0;
    answer->begun_ns = answer->due_ns = answer->asked_ns;
    if (takes_ns || line_bytes) {
        for (int i = 1; i < slots; i++)
            if (slot_free_ns[i] < slot_free_ns[slot]) slot = i;
        if (slots && slot_free_ns[slot] > answer->begun_ns) answer->begun_ns = slot_free_ns[slot];
        if (jitter_ppm) takes_ns += takes_ns * (int64_t)(roll() % jitter_ppm) / 1000000;
        answer->due_ns = answer->begun_ns + takes_ns;
        if (rate && line_bytes) {
            if (line_free_ns > answer->due_ns) answer->due_ns = line_free_ns;
            line_free_ns = answer->due_ns += (int64_t)(line_bytes * 1e9 / rate);
        }
        slot_free_ns[slot] = answer->due_ns;
    }
    answer_t **at = &first;
    while (*at && (*at)->due_ns <= answer->due_ns) at = &(*at)->next;
    answer->next = *at;
    *at = answer;
}

static int64_t size_of(uint64_t inode) {
    if (inode == RECORDS && records) return records;
    if (inode >= OWN && inode < OWN + OWN_FILES && *own[inode - OWN].name)
        return own[inode - OWN].size;
    if (inode >= FIRST && inode < FIRST + (uint64_t)files) return small_bytes;
    return -1;
}

static int describe(uint64_t inode, struct fuse_attr *attr) {
    int64_t size = inode == FUSE_ROOT_ID ? 4096 : size_of(inode);
    if (size < 0) return 0;
    attr->ino = inode, attr->size = size, attr->blocks = (size + 511) / 512, attr->blksize = 4096;
    attr->mode = inode == FUSE_ROOT_ID ? S_IFDIR | 0777 : S_IFREG | 0666;
    attr->nlink = 1;
    return 1;
}

static uint64_t inode_of(const char *name) {
    if (!strcmp(name, "records")) return records ? RECORDS : 0;
    for (int i = 0; i < OWN_FILES; i++)
        if (*own[i].name && !strcmp(name, own[i].name)) return OWN + i;
    char *end;
    long number = strtol(name, &end, 10);
    return strlen(name) == 6 && !*end && number >= 0 && number < files ? FIRST + number : 0;
}

/* Make a file of this name, or empty the one there is; 0 = no room. */
static uint64_t make(const char *name) {
    uint64_t inode = inode_of(name);
    if (inode) return inode;
    for (int i = 0; i < OWN_FILES; i++)
        if (!*own[i].name && strlen(name) < sizeof own[i].name) {
            strcpy(own[i].name, name);
            own[i].size = 0;
            return OWN + i;
        }
    return 0;
}

static int is_own(uint64_t inode) {
    return inode >= OWN && inode < OWN + OWN_FILES && *own[inode - OWN].name;
}

/* Rename a file, over another if need be, or remove it (`to` is NULL). */
static int move(const char *from, const char *to) {
    uint64_t inode = inode_of(from), over = to ? inode_of(to) : 0;
    if (!is_own(inode) || (over && !is_own(over))) return -EACCES;
    if (over && over != inode) *own[over - OWN].name = 0;
    snprintf(own[inode - OWN].name, sizeof own[0].name, "%s", to ? to : "");
    return 0;
}

static size_t list(const struct fuse_read_in *in, char *into) {
    size_t filled = 0;
    for (uint64_t at = in->offset; at <= (uint64_t)files; at++) { /* 0 = records, then the small */
        char name[16] = "records";
        if (at > 0) snprintf(name, sizeof name, "%06u", (unsigned)(at - 1));
        else if (!records) continue;
        size_t length = strlen(name), whole = FUSE_DIRENT_ALIGN(FUSE_NAME_OFFSET + length);
        if (filled + whole > in->size) break;
        struct fuse_dirent *entry = (struct fuse_dirent *)(into + filled);
        memset(entry, 0, whole);
        entry->ino = at ? FIRST + at - 1 : RECORDS;
        entry->off = at + 1, entry->namelen = length, entry->type = S_IFREG >> 12;
        memcpy(entry->name, name, length);
        filled += whole;
    }
    return filled;
}

static void serve(const struct fuse_in_header *head, const void *in) {
    const struct fuse_read_in *wish = in;
    size_t space = head->opcode == FUSE_READDIR ? wish->size : 256, body = 0, line = 0;
    answer_t *answer = calloc(1, sizeof *answer + space);
    int64_t takes_ns = 0;
    int error = 0;
    if (!answer) exit(1);
    answer->asked_ns = now_ns();
    answer->body = answer->own, answer->what = "other";
    switch (head->opcode) {
    case FUSE_INIT: {
        const struct fuse_init_in *asked = in;
        struct fuse_init_out *out = (void *)answer->own;
        out->major = FUSE_KERNEL_VERSION, out->minor = FUSE_KERNEL_MINOR_VERSION;
        out->max_readahead = asked->max_readahead, out->max_write = READ_BYTES, out->max_pages = PAGES;
        out->flags = asked->flags & (FUSE_ASYNC_READ | FUSE_MAX_PAGES | FUSE_PARALLEL_DIROPS);
        out->max_background = 64, out->congestion_threshold = 48;
        body = sizeof *out;
        break;
    }
    case FUSE_LOOKUP: {
        struct fuse_entry_out *out = (void *)answer->own;
        out->nodeid = inode_of(in);
        answer->what = "lookup", takes_ns = meta_ns;
        if (describe(out->nodeid, &out->attr)) body = sizeof *out;
        else error = -ENOENT;
        break;
    }
    case FUSE_GETATTR: {
        struct fuse_attr_out *out = (void *)answer->own;
        answer->what = "getattr", takes_ns = meta_ns;
        if (describe(head->nodeid, &out->attr)) body = sizeof *out;
        else error = -ENOENT;
        break;
    }
    case FUSE_SETATTR: {
        const struct fuse_setattr_in *asked = in;
        struct fuse_attr_out *out = (void *)answer->own;
        if (is_own(head->nodeid) && (asked->valid & FATTR_SIZE))
            own[head->nodeid - OWN].size = asked->size;
        if (describe(head->nodeid, &out->attr)) body = sizeof *out;
        else error = -ENOENT;
        break;
    }
    case FUSE_CREATE: {
        struct fuse_entry_out *out = (void *)answer->own;
        out->nodeid = make((const char *)in + sizeof(struct fuse_create_in));
        answer->what = "open", takes_ns = meta_ns;
        ((struct fuse_open_out *)(out + 1))->open_flags = FOPEN_DIRECT_IO;
        if (describe(out->nodeid, &out->attr)) body = sizeof *out + sizeof(struct fuse_open_out);
        else error = -ENOSPC;
        break;
    }
    case FUSE_WRITE: {
        const struct fuse_write_in *asked = in;
        int64_t end = asked->offset + asked->size;
        if (!is_own(head->nodeid)) error = -EACCES;
        else if (end > own[head->nodeid - OWN].size) own[head->nodeid - OWN].size = end;
        ((struct fuse_write_out *)answer->own)->size = asked->size;
        answer->what = "write", line = asked->size, body = sizeof(struct fuse_write_out);
        break;
    }
    case FUSE_FSYNC: answer->what = "fsync", takes_ns = sync_ns; break;
    case FUSE_UNLINK: error = move(in, NULL); break;
    case FUSE_RENAME2: case FUSE_RENAME: {
        const char *from = (const char *)in + (head->opcode == FUSE_RENAME
            ? sizeof(struct fuse_rename_in) : sizeof(struct fuse_rename2_in));
        error = move(from, from + strlen(from) + 1);
        break;
    }
    case FUSE_OPEN: answer->what = "open", takes_ns = meta_ns; /* fall through */
    case FUSE_OPENDIR:
        if (is_own(head->nodeid)) ((struct fuse_open_out *)answer->own)->open_flags = FOPEN_DIRECT_IO;
        body = sizeof(struct fuse_open_out);
        break;
    case FUSE_READDIR: body = list(wish, answer->own); break;
    case FUSE_READ: {
        int64_t left = size_of(head->nodeid) - (int64_t)wish->offset;
        body = left < 0 ? 0 : left < (int64_t)wish->size ? (size_t)left : wish->size;
        answer->body = made_up, answer->what = "read", takes_ns = read_ns, line = body;
        break;
    }
    case FUSE_STATFS: body = sizeof(struct fuse_statfs_out); break;
    case FUSE_RELEASE: case FUSE_RELEASEDIR: break;
    case FUSE_FORGET: case FUSE_BATCH_FORGET: case FUSE_INTERRUPT: free(answer); return;
    default: error = -ENOSYS;
    }
    if (error) body = 0;
    answer->head = (struct fuse_out_header){sizeof answer->head + body, error, head->unique};
    hold(answer, takes_ns, rate ? line : 0);
}

static int mount_at(const char *mounted) {
    char options[160];
    fuse = open("/dev/fuse", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (fuse < 0) return -1;
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other,"
             "max_read=%d", fuse, READ_BYTES);
    return mount("lab-server:/data", mounted, "fuse.lab", MS_NOSUID | MS_NODEV, options);
}

static int loop(void) {
    struct pollfd watched[2] = {{.fd = 0, .events = POLLIN}, {.fd = fuse, .events = POLLIN}};
    for (;;) {
        while (first && first->due_ns <= now_ns()) {
            answer_t *answer = first;
            first = answer->next;
            send_now(answer);
        }
        int64_t ns = first ? first->due_ns - now_ns() : 0;
        if (ns < 0) ns = 0;
        struct timespec wait = {ns / 1000000000, ns % 1000000000};
        if (ppoll(watched, 2, first ? &wait : NULL, NULL) < 0 && errno != EINTR) return 1;
        if (watched[0].revents) return 0; /* nothing is ever said to it: it has ended */
        if (watched[1].revents & (POLLERR | POLLHUP)) return 0; /* unmounted by somebody */
        for (ssize_t bytes; (bytes = read(fuse, request, sizeof request)) > 0;)
            serve((struct fuse_in_header *)request, request + sizeof(struct fuse_in_header));
        if (errno == ENODEV) return 0;
    }
}

int main(int count, char **words) {
    static const struct { const char *name; int64_t *value; } known[] = {
        {"records", &records}, {"files", &files}, {"bytes", &small_bytes}, {"meta", &meta_ns},
        {"read", &read_ns}, {"sync", &sync_ns}, {"jitter", &jitter_ppm}, {"rate", &rate}, {"slots", &slots},
    };
    for (int i = 3; i < count; i++)
        for (size_t k = 0; k < sizeof known / sizeof *known; k++)
            if (!strncmp(words[i], known[k].name, strlen(known[k].name)) &&
                words[i][strlen(known[k].name)] == '=')
                *known[k].value = atoll(strchr(words[i], '=') + 1);
    if (count < 3 || slots > MOST_SLOTS) return 2;
    for (size_t i = 0; i < sizeof made_up; i++) made_up[i] = (char)roll();
    logged = fopen(words[2], "a");
    if (logged) setvbuf(logged, NULL, _IOLBF, 4096);
    if (!logged || mount_at(words[1])) {
        perror(words[1]);
        return 1;
    }
    /* A busy node must not make the server slower than configured. */
    sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){.sched_priority = 10});
    puts("ready");
    fflush(stdout);
    int code = loop();
    fclose(logged);
    umount2(words[1], MNT_DETACH);
    return code;
}
