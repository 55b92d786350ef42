/* NCCL without a GPU: communicators of several processes that meet in a file, and operations that end when all came.
 *
 * An operation is put on a stream of the shim's CUDA and ends only once its peers' streams have come to theirs; nothing
 * is transferred. ncclCommFinalize and ncclCommDestroy wait for what is under way, as NCCL's do, for ever where a peer
 * is gone; ncclCommAbort ends it.
 *
 * Environment: GPU_SHIM_DIR (where they meet), GPU_SHIM_COMM_MB (4: what a communicator takes of the device).
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "shim.h"

#define EXPORT __attribute__((visibility("default")))
#define MOST 16 /* ranks of a communicator */
enum { OK = 0, UNHANDLED_CUDA = 1, SYSTEM = 2, INVALID = 4, IN_PROGRESS = 7 };

typedef struct { atomic_long joined, collective[MOST], sent[MOST][MOST], wanted[MOST][MOST]; } meeting;
typedef struct comm { meeting *at; int rank, ranks; atomic_int aborted; atomic_long running; long collectives, sends[MOST], receives[MOST]; long bytes; } comm;
typedef struct { char internal[128]; } unique_id;
typedef struct { comm *comm; int what, peer; long number; void *stream; } one; /* what: 0 collective, 1 send, 2 receive */
typedef struct { int count; one of[256]; } batch;

static atomic_long aborts, destroys, open_ones, most_ctas;
static _Thread_local int depth;
static _Thread_local batch grouped;

EXPORT long gpu_shim_nccl_aborts(void) { return aborts; }
EXPORT long gpu_shim_nccl_destroys(void) { return destroys; }
EXPORT long gpu_shim_nccl_open(void) { return open_ones; }
EXPORT long gpu_shim_nccl_most_ctas(void) { return most_ctas; } /* that any communicator may have, where none is left to NCCL */

static int is_done(const one *o) {
    comm *c = o->comm;
    if (o->what == 1) return c->at->wanted[o->peer][c->rank] >= o->number;
    if (o->what == 2) return c->at->sent[o->peer][c->rank] >= o->number;
    for (int r = 0; r < c->ranks; r++) if (c->at->collective[r] < o->number) return 0;
    return 1;
}
static void run(void *given) {
    batch *b = given;
    for (int i = 0; i < b->count; i++) {
        one *o = &b->of[i]; comm *c = o->comm;
        if (o->what == 0) c->at->collective[c->rank] = o->number;
        if (o->what == 1) c->at->sent[c->rank][o->peer] = o->number;
        if (o->what == 2) c->at->wanted[c->rank][o->peer] = o->number;
    }
    for (int i = 0; i < b->count; i++) {
        one *o = &b->of[i];
        while (!is_done(o) && !o->comm->aborted && !gpu_shim_is_broken()) usleep(20);
        o->comm->running--;
    }
    free(b);
}
static int flush(void) {
    while (grouped.count) { /* a batch for each stream */
        batch *b = malloc(sizeof *b);
        b->count = 0;
        void *stream = grouped.of[0].stream;
        int left = 0;
        for (int i = 0; i < grouped.count; i++)
            if (grouped.of[i].stream == stream) b->of[b->count++] = grouped.of[i];
            else grouped.of[left++] = grouped.of[i];
        grouped.count = left;
        if (shim_enqueue(stream, run, b)) return UNHANDLED_CUDA;
    }
    return OK;
}
static int add(comm *c, int what, int peer, void *stream) {
    if (what && (peer < 0 || peer >= c->ranks)) return INVALID;
    long number = what == 0 ? ++c->collectives : what == 1 ? ++c->sends[peer] : ++c->receives[peer];
    c->running++;
    grouped.of[grouped.count++] = (one){c, what, peer, number, stream};
    return depth ? OK : flush();
}

EXPORT int ncclGetVersion(int *v) { *v = 22907; return OK; }
EXPORT const char *ncclGetErrorString(int e) { return e ? "error of the NCCL shim" : "no error"; }
EXPORT const char *ncclGetLastError(void *c) { (void)c; return ""; }
EXPORT int ncclGetUniqueId(unique_id *id) {
    static atomic_int number;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "%d-%d-%ld", getpid(), ++number, random());
    return OK;
}
EXPORT int ncclCommInitRankConfig(comm **to, int ranks, unique_id id, int rank, void *config) {
    int ctas = config ? ((int *)config)[7] : 0; /* ncclConfig_t.maxCTAs; INT_MIN where it is not set */
    if (ctas <= 0) ctas = 32;
    if (ctas > most_ctas) most_ctas = ctas;
    if (ranks > MOST) return INVALID;
    char path[4096];
    snprintf(path, sizeof path, "%s/nccl-%.100s", getenv("GPU_SHIM_DIR") ? getenv("GPU_SHIM_DIR") : "/tmp", id.internal);
    int fd = open(path, O_RDWR | O_CREAT, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(meeting))) return SYSTEM;
    comm *c = calloc(1, sizeof *c);
    c->at = mmap(NULL, sizeof(meeting), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    c->rank = rank; c->ranks = ranks;
    const char *mb = getenv("GPU_SHIM_COMM_MB");
    c->bytes = (mb && *mb ? atol(mb) : 4) << 20;
    if (shim_take(c->bytes)) return UNHANDLED_CUDA;
    c->at->joined++;
    while (c->at->joined < ranks) usleep(200); /* torch's own store has a timeout before this */
    *to = c; open_ones++;
    return OK;
}
EXPORT int ncclCommInitRank(comm **to, int ranks, unique_id id, int rank) { return ncclCommInitRankConfig(to, ranks, id, rank, NULL); }
static void close_it(comm *c) { if (c->bytes) { shim_give(c->bytes); c->bytes = 0; open_ones--; } }
EXPORT int ncclCommFinalize(comm *c) { while (c->running && !c->aborted) usleep(200); return OK; }
EXPORT int ncclCommDestroy(comm *c) { destroys++; ncclCommFinalize(c); close_it(c); return OK; }
/* Aborting frees what kernels still use, so it waits for what is on the streams, and that may wait for another one that
 * has to be aborted meanwhile (pytorch/pytorch issue 119797). */
EXPORT int ncclCommAbort(comm *c) { aborts++; c->aborted = 1; while (c->running && !gpu_shim_is_broken()) usleep(200); close_it(c); return OK; }
EXPORT int ncclCommGetAsyncError(comm *c, int *e) { (void)c; *e = OK; return OK; }
EXPORT int ncclCommCount(comm *c, int *n) { *n = c->ranks; return OK; }
EXPORT int ncclCommUserRank(comm *c, int *r) { *r = c->rank; return OK; }
EXPORT int ncclGroupStart(void) { depth++; return OK; }
EXPORT int ncclGroupEnd(void) { return --depth ? OK : flush(); }
EXPORT int ncclSend(const void *p, size_t n, int t, int peer, comm *c, void *s) { (void)p; (void)n; (void)t; return add(c, 1, peer, s); }
EXPORT int ncclRecv(void *p, size_t n, int t, int peer, comm *c, void *s) { (void)p; (void)n; (void)t; return add(c, 2, peer, s); }
EXPORT int ncclAllReduce(const void *a, void *b, size_t n, int t, int o, comm *c, void *s) { (void)a; (void)b; (void)n; (void)t; (void)o; return add(c, 0, 0, s); }
EXPORT int ncclAllGather(const void *a, void *b, size_t n, int t, comm *c, void *s) { (void)a; (void)b; (void)n; (void)t; return add(c, 0, 0, s); }
EXPORT int ncclReduceScatter(const void *a, void *b, size_t n, int t, int o, comm *c, void *s) { (void)a; (void)b; (void)n; (void)t; (void)o; return add(c, 0, 0, s); }
EXPORT int ncclBroadcast(const void *a, void *b, size_t n, int t, int root, comm *c, void *s) { (void)a; (void)b; (void)n; (void)t; (void)root; return add(c, 0, 0, s); }
EXPORT int ncclReduce(const void *a, void *b, size_t n, int t, int o, int root, comm *c, void *s) { (void)a; (void)b; (void)n; (void)t; (void)o; (void)root; return add(c, 0, 0, s); }
