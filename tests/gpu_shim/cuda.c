/* A CUDA runtime (and the little of the driver that torch asks for) without a GPU.
 *
 * A stream is a queue and a thread that works it off: kernels only take a random while, copies from a device copy, events are passed in
 * order. With no delay, what comes to a stream that has nothing to do is done at once. Memory is the host's, counted in
 * a file that all processes of a test share, with a limit for each GPU; that of a process that is gone is given back.
 * What is tested with it is order, lifetime, memory and errors; kernels compute nothing.
 *
 * Environment: GPU_SHIM_DIR (folder of the shared counts), GPU_SHIM_DEVICES (2), GPU_SHIM_MEMORY_MB (2048),
 * GPU_SHIM_CONTEXT_MB (64: what a process takes of each GPU that it uses), GPU_SHIM_KERNEL_US (0: longest delay).
 * CUDA_VISIBLE_DEVICES is honoured: numbers, or nothing.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include "shim.h"

#define EXPORT __attribute__((visibility("default")))
#define MOST_GPUS 64
enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_DEVICE = 100, BAD_DEVICE = 101, NOT_READY = 600, ILLEGAL_ADDRESS = 700,
       NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALID = 901 };

typedef struct { unsigned x, y, z; } dim3;
typedef struct event { uint64_t recorded, passed; double at_s; struct graph *capture; } event;
typedef enum { DELAY, RECORD, WAIT, CALL } kind;
typedef struct op { kind kind; event *event; uint64_t until; shim_call call; void *data; struct op *next; } op;
typedef struct graph { op *first, *last; int nodes; uint64_t id; } graph;
typedef struct stream {
    op *first, *last; int busy, priority, device; pthread_t thread; graph *capture; int owns_capture; unsigned seed;
    struct stream *next; pthread_cond_t more;
} stream;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static stream *streams, *default_stream[MOST_GPUS];
static int broken, stalled;
static _Thread_local int current, last_error;
static atomic_long waits, streams_made, launched;
static uint64_t captures;

/* --- GPUs and their memory --- */
static int gpus[MOST_GPUS], gpu_count = -1, used_context[MOST_GPUS];
static atomic_long *taken, *most; /* bytes by GPU now, and at most so far, shared by all processes */
#define MOST_PROCESSES 256
typedef struct { atomic_int pid; atomic_long held[MOST_GPUS]; } process; /* and how much of them each process has */
typedef struct { atomic_long taken[MOST_GPUS], most[MOST_GPUS]; process processes[MOST_PROCESSES]; } counts;
static process *all_processes, *own;
static int nonzero; /* whether a byte of any GPU's memory may be something else than 0 */
typedef struct block { void *at; size_t size; int gpu; int type; struct block *next; } block;
static block *blocks;

static long setting(const char *name, long value) { const char *s = getenv(name); return s && *s ? atol(s) : value; }
static long limit(void) { return setting("GPU_SHIM_MEMORY_MB", 2048) << 20; }

static void give_back(process *p) { for (int g = 0; g < MOST_GPUS; g++) taken[g] -= atomic_exchange(&p->held[g], 0); }
static void give_all_back(void) { if (own && own->pid == getpid()) give_back(own); } /* not what is forked */
static int is_gone(int pid) {
    char path[64], state = 'Z';
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file) return 1;
    if (fscanf(file, "%*d (%*[^)]) %c", &state) < 1) state = 'Z';
    fclose(file);
    return state == 'Z';
}
static void give_back_of_the_dead(void) { /* as a driver does */
    for (process *p = all_processes; p < all_processes + MOST_PROCESSES; p++) {
        int pid = p->pid;
        if (pid <= 0 || !is_gone(pid) || !atomic_compare_exchange_strong(&p->pid, &pid, -1)) continue;
        give_back(p);
        p->pid = 0;
    }
}

static void begin(void) {
    if (gpu_count >= 0) return;
    int all = (int)setting("GPU_SHIM_DEVICES", 2);
    const char *seen = getenv("CUDA_VISIBLE_DEVICES");
    gpu_count = 0;
    if (!seen) for (int i = 0; i < all && i < MOST_GPUS; i++) gpus[gpu_count++] = i;
    else for (const char *s = seen; *s && gpu_count < MOST_GPUS;) {
        char *end; long n = strtol(s, &end, 10);
        if (end == s || n < 0 || n >= all) break;
        gpus[gpu_count++] = (int)n;
        s = *end == ',' ? end + 1 : end;
    }
    char path[4096];
    snprintf(path, sizeof path, "%s/memory", getenv("GPU_SHIM_DIR") ? getenv("GPU_SHIM_DIR") : "/tmp");
    int fd = open(path, O_RDWR | O_CREAT, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(counts))) { perror(path); abort(); }
    counts *shared = mmap(NULL, sizeof(counts), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    taken = shared->taken; most = shared->most; all_processes = shared->processes;
    close(fd);
    give_back_of_the_dead();
    for (int i = 0, none = 0; !own; i = (i + 1) % MOST_PROCESSES, none = 0)
        if (atomic_compare_exchange_strong(&all_processes[i].pid, &none, getpid())) own = &all_processes[i];
    atexit(give_all_back);
}

static int take(int gpu, size_t size) { /* under the lock */
    if (taken[gpu] + (long)size > limit()) give_back_of_the_dead();
    if (taken[gpu] + (long)size > limit()) return NO_MEMORY;
    own->held[gpu] += size;
    long now = taken[gpu] += size;
    for (long before = most[gpu]; now > before && !atomic_compare_exchange_weak(&most[gpu], &before, now);) {}
    return OK;
}
static void give(int gpu, size_t size) { taken[gpu] -= size; own->held[gpu] -= size; }

/* Count a wait of the host for the GPU, and write down which, when, and the Python code that waits. Under the lock. */
static void waited(const char *what) {
    static int log = -1;
    waits++;
    if (!getenv("GPU_SHIM_DIR")) return;
    if (log < 0) {
        char path[4096];
        snprintf(path, sizeof path, "%s/waits-%d", getenv("GPU_SHIM_DIR"), getpid());
        log = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    }
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    dprintf(log, "%s %ld.%09ld\n", what, (long)t.tv_sec, t.tv_nsec);
    void *(*state)(void) = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
    void (*dump)(int, void *) = (void (*)(int, void *))dlsym(RTLD_DEFAULT, "_Py_DumpTraceback"); /* faulthandler's */
    void *python = state && dump ? state() : NULL;
    if (python) dump(log, python);
}

static int failed(int error) { if (error && error != NOT_READY) last_error = error; return error; }

static int ready(void) { /* the device that this thread has chosen is there, and has a context */
    begin();
    if (!gpu_count) return failed(NO_DEVICE);
    int gpu = gpus[current];
    if (!used_context[gpu]) {
        used_context[gpu] = 1;
        int error = take(gpu, (size_t)setting("GPU_SHIM_CONTEXT_MB", 64) << 20);
        if (error) return failed(error);
    }
    return broken ? failed(ILLEGAL_ADDRESS) : OK;
}
#define BEGIN pthread_mutex_lock(&lock); int error = ready(); if (error) { pthread_mutex_unlock(&lock); return error; }
#define END(value) do { int result = failed(value); pthread_mutex_unlock(&lock); return result; } while (0)

int shim_take(long size) { pthread_mutex_lock(&lock); int e = ready(); if (!e) e = take(gpus[current], size); pthread_mutex_unlock(&lock); return e; }
void shim_give(long size) { pthread_mutex_lock(&lock); give(gpus[current], size); pthread_mutex_unlock(&lock); }

static int hold(void **at, size_t size, int type) {
    int gpu = gpus[current];
    if (type == 2) { int error = take(gpu, size); if (error) return error; }
    void *found = mmap(NULL, size ? size : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return NO_MEMORY;
    block *b = malloc(sizeof *b);
    *b = (block){found, size, current, type, blocks};
    blocks = b; *at = found;
    return OK;
}
static block *find(const void *p) {
    for (block *b = blocks; b; b = b->next) if ((char *)p >= (char *)b->at && (char *)p < (char *)b->at + b->size) return b;
    return NULL;
}
static int drop(void *at) {
    for (block **b = &blocks; *b; b = &(*b)->next) if ((*b)->at == at) {
        block *gone = *b; *b = gone->next;
        if (gone->type == 2) give(gpus[gone->gpu], gone->size);
        munmap(gone->at, gone->size ? gone->size : 1); free(gone);
        return OK;
    }
    return at ? INVALID : OK;
}

/* --- streams --- */
static void do_copy(void *given);
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }

static void *work(void *given) {
    stream *s = given;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!s->first) pthread_cond_wait(&s->more, &lock);
        op *o = s->first;
        if (o->kind == WAIT) while (o->event->passed < o->until && !broken) pthread_cond_wait(&changed, &lock);
        if (o->kind == RECORD && o->event->passed < o->until) { o->event->passed = o->until; o->event->at_s = now(); }
        while (o->kind == DELAY && stalled && !broken) pthread_cond_wait(&changed, &lock);
        if ((o->kind == DELAY || o->kind == CALL) && !broken) {
            long most = setting("GPU_SHIM_KERNEL_US", 0);
            pthread_mutex_unlock(&lock);
            if (o->kind == CALL) o->call(o->data);
            else if (most) usleep(rand_r(&s->seed) % (most + 1));
            pthread_mutex_lock(&lock);
        }
        s->first = o->next;
        if (!s->first) s->last = NULL, s->busy = 0;
        free(o);
        pthread_cond_broadcast(&changed);
    }
    return NULL;
}
static stream *make(int priority) {
    stream *s = calloc(1, sizeof *s);
    s->priority = priority; s->device = current; s->seed = (unsigned)(getpid() * 31 + ++streams_made);
    s->next = streams; streams = s;
    pthread_cond_init(&s->more, NULL);
    pthread_create(&s->thread, NULL, work, s);
    return s;
}
static stream *of(void *given) {
    if ((uintptr_t)given > 2) return given;
    if (!default_stream[current]) default_stream[current] = make(0);
    return default_stream[current];
}
static void append(stream *s, op *o) {
    if (s->capture) {
        graph *g = s->capture;
        if (g->last) g->last->next = o; else g->first = o;
        g->last = o; g->nodes++;
        return;
    }
    if (s->last) s->last->next = o; else s->first = o;
    s->last = o; s->busy = 1;
    pthread_cond_signal(&s->more);
}
/* Whether a stream would do this at once, and nobody could tell the difference but for the time it takes. */
static int at_once(stream *s, kind k, event *e, uint64_t until, shim_call call, void *data) {
    static long delay = -1;
    if (delay < 0) delay = setting("GPU_SHIM_KERNEL_US", 0);
    if (delay || s->busy || s->capture || stalled || broken) return 0;
    if (k == WAIT) return e->passed >= until;
    if (k == CALL && call != do_copy) return 0;
    if (k == CALL) call(data);
    if (k == RECORD) { e->passed = until; e->at_s = now(); pthread_cond_broadcast(&changed); }
    return 1;
}
static void put(stream *s, kind k, event *e, uint64_t until, shim_call call, void *data) {
    if (at_once(s, k, e, until, call, data)) return;
    op *o = malloc(sizeof *o);
    *o = (op){k, e, until, call, data, NULL};
    append(s, o);
}
int shim_enqueue(void *given, shim_call call, void *data) {
    BEGIN
    put(of(given), CALL, NULL, 0, call, data);
    END(OK);
}
static int drain(stream *s) { while (s->busy && !broken) pthread_cond_wait(&changed, &lock); return broken ? ILLEGAL_ADDRESS : OK; }

/* --- for tests --- */
EXPORT long gpu_shim_host_waits(void) { return waits; }
EXPORT long gpu_shim_streams(void) { return streams_made; }
EXPORT long gpu_shim_launches(void) { return launched; }
EXPORT long gpu_shim_taken(int gpu) { begin(); give_back_of_the_dead(); return taken[gpu]; }
EXPORT int gpu_shim_is_broken(void) { return broken; }
EXPORT void gpu_shim_stall(void) { pthread_mutex_lock(&lock); stalled = 1; pthread_mutex_unlock(&lock); } /* no kernel ends any more */
EXPORT void gpu_shim_break(void) { pthread_mutex_lock(&lock); broken = 1; pthread_cond_broadcast(&changed); pthread_mutex_unlock(&lock); }

/* --- devices --- */
EXPORT int cudaGetDeviceCount(int *n) { pthread_mutex_lock(&lock); begin(); *n = gpu_count; END(gpu_count ? OK : NO_DEVICE); }
EXPORT int cudaSetDevice(int d) { pthread_mutex_lock(&lock); begin(); if (d < 0 || d >= gpu_count) END(BAD_DEVICE); current = d; END(ready()); }
EXPORT int cudaGetDevice(int *d) { begin(); *d = current; return gpu_count ? OK : failed(NO_DEVICE); }
EXPORT int cudaGetLastError(void) { int e = broken ? ILLEGAL_ADDRESS : last_error; last_error = 0; return e; }
EXPORT int cudaPeekAtLastError(void) { return broken ? ILLEGAL_ADDRESS : last_error; }
EXPORT const char *cudaGetErrorString(int e) {
    return e == OK ? "no error" : e == NO_MEMORY ? "out of memory" : e == NO_DEVICE ? "no CUDA-capable device is detected"
         : e == ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : e == NOT_READY ? "device not ready"
         : e == CAPTURE_UNSUPPORTED ? "operation not permitted when stream is capturing" : "error of the GPU shim";
}
EXPORT const char *cudaGetErrorName(int e) { return e == ILLEGAL_ADDRESS ? "cudaErrorIllegalAddress" : e == NO_MEMORY ? "cudaErrorMemoryAllocation" : "cudaErrorOfTheShim"; }
EXPORT int cudaDriverGetVersion(int *v) { *v = 13000; return OK; }
EXPORT int cudaRuntimeGetVersion(int *v) { *v = 13000; return OK; }
EXPORT int cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = a != b; return OK; }
EXPORT int cudaDeviceEnablePeerAccess(int d, unsigned f) { (void)d; (void)f; return OK; }
EXPORT int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return OK; }
EXPORT int cudaDeviceGetPCIBusId(char *to, int n, int d) { snprintf(to, n, "0000:%02x:00.0", gpus[d]); return OK; }
EXPORT int cudaDeviceGetAttribute(int *value, int what, int d) {
    (void)d;
    switch (what) {
    case 1: case 2: case 3: *value = 1024; break; /* threads of a block, and its width and height */
    case 4: *value = 64; break;
    case 5: *value = 0x7fffffff; break; /* blocks of a grid in each direction; CUB divides by it */
    case 6: case 7: *value = 65535; break;
    case 8: *value = 49152; break; /* shared memory of a block */
    case 10: *value = 32; break; /* warp */
    case 16: *value = 132; break; /* multiprocessors */
    case 39: *value = 2048; break;
    case 75: *value = 9; break; /* compute capability */
    case 76: *value = 0; break;
    case 97: *value = 232448; break; /* shared memory of a block, opt in */
    case 81: *value = 233472; break;
    case 106: *value = 32; break;
    default: *value = 0;
    }
    return OK;
}
EXPORT int cudaGetDeviceProperties(void *to, int d) {
    begin();
    if (d < 0 || d >= gpu_count) return failed(BAD_DEVICE);
    struct { char name[256]; char uuid[16]; char luid[8]; unsigned mask; size_t memory, shared; int regs, warp; size_t pitch;
             int threads, dim[3], grid[3]; size_t constant; int major, minor; size_t align, pitch_align; int sms; } p = {
        .memory = limit(), .shared = 49152, .regs = 65536, .warp = 32, .pitch = 1 << 30, .threads = 1024,
        .dim = {1024, 1024, 64}, .grid = {0x7fffffff, 65535, 65535}, .constant = 65536, .major = 9, .sms = 132,
        .align = 512, .pitch_align = 32 };
    memset(to, 0, 800);
    const char *name = getenv("GPU_SHIM_NAME");
    snprintf(p.name, sizeof p.name, "%s", name && *name ? name : "GPU shim");
    snprintf(p.uuid, sizeof p.uuid, "shim%d", gpus[d]);
    memcpy(to, &p, sizeof p);
    /* Offsets of CUDA 13: threads, bytes of shared memory and registers of a multiprocessor, bytes that a block may have */
    ((int *)to)[604 / 4] = 2048; ((size_t *)to)[624 / 8] = 233472; ((int *)to)[632 / 4] = 65536; ((size_t *)to)[672 / 8] = 232448;
    return OK;
}

/* --- memory --- */
EXPORT int cudaMalloc(void **at, size_t size) { BEGIN END(hold(at, size, 2)); }
EXPORT int cudaFree(void *at) { BEGIN if (at) waited("cudaFree"); END(drop(at)); }
EXPORT int cudaHostAlloc(void **at, size_t size, unsigned flags) { (void)flags; BEGIN END(hold(at, size, 1)); }
EXPORT int cudaFreeHost(void *at) { BEGIN END(drop(at)); }
EXPORT int cudaHostRegister(void *at, size_t n, unsigned f) { (void)at; (void)n; (void)f; return OK; }
EXPORT int cudaHostUnregister(void *at) { (void)at; return OK; }
EXPORT int cudaMemGetInfo(size_t *left, size_t *total) { BEGIN give_back_of_the_dead(); *total = limit(); *left = limit() - taken[gpus[current]]; END(OK); }
EXPORT int cudaPointerGetAttributes(void *to, const void *p) {
    pthread_mutex_lock(&lock);
    block *b = find(p);
    struct { int type, device; void *dev, *host; long more[8]; } found = {b ? b->type : 0, b ? b->gpu : -2, b ? (void *)p : NULL, (void *)p, {0}};
    memcpy(to, &found, 24);
    END(OK);
}
typedef struct { void *to; const void *from; size_t n; int value; void *staged; } copy;
static void do_copy(void *given) { copy *c = given; if (c->from) memmove(c->to, c->from, c->n); else memset(c->to, c->value, c->n); free(c->staged); free(c); }
static int is_pinned_or_device(const void *p) { return find(p) != NULL; }
static int is_device(const void *p) { block *b = find(p); return b && b->type >= 2; }
/* What comes from the host arrives as zeros. Kernels leave all else as it is, so every number on a device is 0, rather
 * than whatever the memory was used for before, of which a run would say that its loss is not finite. */
static copy *copy_of(void *to, const void *from, size_t n) {
    copy *c = malloc(sizeof *c);
    *c = (copy){to, is_device(to) && (!is_device(from) || !nonzero) ? NULL : from, n, 0, NULL};
    if (!c->from && !nonzero) c->n = 0; /* they are zeros already, and pages that nobody writes take no memory */
    return c;
}
EXPORT int cudaMemcpyAsync(void *to, const void *from, size_t n, int how, void *given) {
    (void)how;
    BEGIN
    stream *s = of(given);
    copy *c = copy_of(to, from, n);
    if (!is_pinned_or_device(from) && !s->capture) {
        if (c->from) { memcpy(c->staged = malloc(n ? n : 1), from, n); c->from = c->staged; }
        waited("copy from pageable memory");
    }
    int waiting = !is_pinned_or_device(to);
    put(s, CALL, NULL, 0, do_copy, c);
    if (waiting && !s->capture) { waited("copy to pageable memory"); END(drain(s)); }
    END(OK);
}
EXPORT int cudaMemcpy(void *to, const void *from, size_t n, int how) {
    (void)how;
    BEGIN
    stream *s = of(NULL); copy *c = copy_of(to, from, n);
    put(s, CALL, NULL, 0, do_copy, c);
    waited("cudaMemcpy");
    END(drain(s));
}
EXPORT int cudaMemcpyPeerAsync(void *to, int d, const void *from, int f, size_t n, void *s) { (void)d; (void)f; return cudaMemcpyAsync(to, from, n, 3, s); }
EXPORT int cudaMemsetAsync(void *to, int value, size_t n, void *given) {
    BEGIN
    copy *c = malloc(sizeof *c);
    nonzero |= value != 0;
    *c = (copy){to, NULL, nonzero || !is_device(to) ? n : 0, value, NULL};
    put(of(given), CALL, NULL, 0, do_copy, c);
    END(OK);
}
EXPORT int cudaMemset(void *to, int value, size_t n) { return cudaMemsetAsync(to, value, n, NULL); }

/* --- streams and events --- */
EXPORT int cudaStreamCreateWithPriority(void **s, unsigned flags, int priority) { (void)flags; BEGIN *s = make(priority); END(OK); }
EXPORT int cudaStreamCreateWithFlags(void **s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
EXPORT int cudaStreamCreate(void **s) { return cudaStreamCreateWithPriority(s, 0, 0); }
EXPORT int cudaStreamDestroy(void *s) { (void)s; return OK; }
EXPORT int cudaStreamGetPriority(void *s, int *p) { BEGIN *p = of(s)->priority; END(OK); }
EXPORT int cudaStreamQuery(void *s) { BEGIN stream *q = of(s); END(q->capture ? CAPTURE_UNSUPPORTED : q->busy ? NOT_READY : OK); }
EXPORT int cudaStreamSynchronize(void *s) { BEGIN stream *q = of(s); if (q->capture) END(CAPTURE_UNSUPPORTED); waited("cudaStreamSynchronize"); END(drain(q)); }
EXPORT int cudaDeviceSynchronize(void) {
    BEGIN
    waited("cudaDeviceSynchronize");
    for (stream *s = streams; s; s = s->next) if (drain(s)) END(ILLEGAL_ADDRESS);
    END(OK);
}
EXPORT int cudaEventCreateWithFlags(void **e, unsigned flags) { (void)flags; *e = calloc(1, sizeof(event)); return OK; }
EXPORT int cudaEventCreate(void **e) { return cudaEventCreateWithFlags(e, 0); }
EXPORT int cudaEventDestroy(void *e) { (void)e; return OK; } /* queues may still hold it; tests are short */
EXPORT int cudaEventRecord(void *given, void *s) {
    BEGIN
    event *e = given; stream *q = of(s);
    e->recorded++; e->capture = q->capture;
    if (q->capture) e->passed = e->recorded; else put(q, RECORD, e, e->recorded, NULL, NULL);
    END(OK);
}
EXPORT int cudaEventRecordWithFlags(void *e, void *s, unsigned f) { (void)f; return cudaEventRecord(e, s); }
EXPORT int cudaEventQuery(void *given) { BEGIN event *e = given; END(e->passed < e->recorded ? NOT_READY : OK); }
EXPORT int cudaEventSynchronize(void *given) {
    BEGIN
    event *e = given; uint64_t until = e->recorded;
    if (e->passed < until) waited("cudaEventSynchronize");
    while (e->passed < until && !broken) pthread_cond_wait(&changed, &lock);
    END(broken ? ILLEGAL_ADDRESS : OK);
}
EXPORT int cudaEventElapsedTime(float *ms, void *a, void *b) {
    event *x = a, *y = b;
    if (x->passed < x->recorded || y->passed < y->recorded) return failed(NOT_READY);
    *ms = (float)((y->at_s - x->at_s) * 1e3);
    return broken ? failed(ILLEGAL_ADDRESS) : OK;
}
EXPORT int cudaStreamWaitEvent(void *s, void *given, unsigned flags) {
    (void)flags;
    BEGIN
    event *e = given; stream *q = of(s);
    if (e->capture && !q->capture) { q->capture = e->capture; q->owns_capture = 0; } /* the stream joins the capture */
    else if (!q->capture) put(q, WAIT, e, e->recorded, NULL, NULL);
    END(OK);
}
EXPORT int cudaLaunchHostFunc(void *s, shim_call call, void *data) { return shim_enqueue(s, call, data); }

/* --- kernels --- */
static _Thread_local struct { dim3 grid, block; size_t shared; void *stream; } pushed;
static int launch(void *s) { BEGIN launched++; put(of(s), DELAY, NULL, 0, NULL, NULL); END(OK); }
EXPORT unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t n, void *s) { pushed.grid = g; pushed.block = b; pushed.shared = n; pushed.stream = s; return 0; }
EXPORT int __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *n, void **s) { *g = pushed.grid; *b = pushed.block; *n = pushed.shared; *s = pushed.stream; return OK; }
EXPORT int cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t n, void *s) { (void)f; (void)g; (void)b; (void)a; (void)n; return launch(s); }
EXPORT int __cudaLaunchKernel(void *f, dim3 g, dim3 b, void **a, size_t n, void *s) { return cudaLaunchKernel(f, g, b, a, n, s); }
EXPORT int cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **a, size_t n, void *s) { return cudaLaunchKernel(f, g, b, a, n, s); }
EXPORT int cudaLaunchKernelExC(const void *config, const void *f, void **a) { (void)f; (void)a; return launch(*(void **)((char *)config + 32)); }
EXPORT int __cudaGetKernel(void **k, const void *f) { *k = (void *)f; return OK; }
EXPORT void **__cudaRegisterFatBinary(void *b) { (void)b; static void *one; return &one; }
EXPORT int cudaFuncGetAttributes(void *to, const void *f) { (void)f; memset(to, 0, 64); ((int *)to)[6] = 1024; ((int *)to)[7] = 32; ((int *)to)[8] = ((int *)to)[9] = 90; return OK; }
EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t s) { (void)f; (void)b; (void)s; *n = 2; return OK; }
EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned g) { (void)g; return cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, f, b, s); }

/* --- graphs --- */
EXPORT int cudaStreamBeginCapture(void *s, int mode) { (void)mode; BEGIN stream *q = of(s); q->capture = calloc(1, sizeof(graph)); q->capture->id = ++captures; q->owns_capture = 1; END(OK); }
EXPORT int cudaStreamEndCapture(void *s, void **g) {
    BEGIN
    stream *q = of(s); graph *made = q->capture; *g = made;
    for (stream *other = streams; other; other = other->next) if (other->capture == made) other->capture = NULL, other->owns_capture = 0;
    END(made ? OK : CAPTURE_INVALID);
}
EXPORT int cudaStreamIsCapturing(void *s, int *is) { BEGIN *is = of(s)->capture ? 1 : 0; END(OK); }
EXPORT int cudaStreamGetCaptureInfo(void *s, int *is, unsigned long long *id, void **g, void **deps, void **edges, size_t *n) {
    BEGIN
    graph *c = of(s)->capture;
    *is = c ? 1 : 0;
    if (id) *id = c ? c->id : 0;
    if (g) *g = c;
    if (deps) *deps = NULL;
    if (edges) *edges = NULL;
    if (n) *n = 0;
    END(OK);
}
EXPORT int cudaThreadExchangeStreamCaptureMode(int *mode) { (void)mode; return OK; }
EXPORT int cudaGraphInstantiateWithFlags(void **exec, void *g, unsigned long long f) { (void)f; *exec = g; return OK; }
EXPORT int cudaGraphGetNodes(void *g, void **nodes, size_t *n) { (void)nodes; *n = ((graph *)g)->nodes; return OK; }
EXPORT int cudaGraphDestroy(void *g) { (void)g; return OK; }
EXPORT int cudaGraphExecDestroy(void *g) { (void)g; return OK; }
EXPORT int cudaGraphLaunch(void *g, void *s) {
    BEGIN
    stream *q = of(s);
    for (op *o = ((graph *)g)->first; o; o = o->next)
        if (o->kind == CALL) {
            copy *c = malloc(sizeof *c); *c = *(copy *)o->data; c->staged = NULL; /* only copies are captured as calls */
            put(q, CALL, NULL, 0, do_copy, c);
        } else put(q, DELAY, NULL, 0, NULL, NULL);
    END(OK);
}

/* --- the driver: segments that grow, and what says which device is current --- */
typedef struct { size_t size; int gpu; } part;
EXPORT int cuMemAddressReserve(void **at, size_t n, size_t align, void *hint, unsigned long long f) {
    (void)align; (void)hint; (void)f;
    char *found = mmap(NULL, n + (2 << 20), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *at = (void *)(((uintptr_t)found + (2 << 20) - 1) & ~(uintptr_t)((2 << 20) - 1));
    pthread_mutex_lock(&lock);
    block *b = malloc(sizeof *b); *b = (block){*at, n, current, 3, blocks}; blocks = b;
    pthread_mutex_unlock(&lock);
    return found == MAP_FAILED ? NO_MEMORY : OK;
}
EXPORT int cuMemAddressFree(void *at, size_t n) { (void)n; BEGIN END(drop(at)); }
EXPORT int cuMemCreate(void **made, size_t n, const void *p, unsigned long long f) {
    (void)p; (void)f;
    BEGIN
    error = take(gpus[current], n);
    if (!error) { part *one = malloc(sizeof *one); *one = (part){n, gpus[current]}; *made = one; }
    pthread_mutex_unlock(&lock);
    return error;
}
EXPORT int cuMemRelease(void *p) { pthread_mutex_lock(&lock); give(((part *)p)->gpu, ((part *)p)->size); free(p); pthread_mutex_unlock(&lock); return OK; }
EXPORT int cuMemMap(void *at, size_t n, size_t o, void *p, unsigned long long f) { (void)o; (void)p; (void)f; return mprotect(at, n, PROT_READ | PROT_WRITE) ? INVALID : OK; }
EXPORT int cuMemUnmap(void *at, size_t n) { madvise(at, n, MADV_DONTNEED); return mprotect(at, n, PROT_NONE) ? INVALID : OK; }
EXPORT int cuMemSetAccess(void *at, size_t n, const void *d, size_t k) { (void)at; (void)n; (void)d; (void)k; return OK; }
EXPORT int cuMemGetAllocationGranularity(size_t *n, const void *p, int f) { (void)p; (void)f; *n = 2 << 20; return OK; }
EXPORT int cuDeviceGet(int *to, int d) { *to = d; return OK; }
EXPORT int cuDeviceGetAttribute(int *v, int what, int d) { return cudaDeviceGetAttribute(v, what, d); }
EXPORT int cuGetErrorString(int e, const char **s) { *s = cudaGetErrorString(e); return OK; }
EXPORT int cuCtxGetCurrent(void **c) { static int one; *c = &one; return OK; }
EXPORT int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *active) { (void)d; if (f) *f = 0; *active = used_context[gpus[d]]; return OK; }
/* What Triton asks of the driver: it compiles kernels for the GPU that is described, and loads and starts them. */
EXPORT int cuDriverGetVersion(int *v) { *v = 13000; return OK; }
EXPORT int cuCtxSetCurrent(void *c) { (void)c; return OK; }
EXPORT int cuCtxGetLimit(size_t *v, int what) { (void)what; *v = 1024; return OK; }
EXPORT int cuCtxSetLimit(int what, size_t v) { (void)what; (void)v; return OK; }
EXPORT int cuDevicePrimaryCtxRetain(void **c, int d) { (void)d; return cuCtxGetCurrent(c); }
EXPORT int cuModuleLoadData(void **m, const void *image) { *m = (void *)image; return OK; }
EXPORT int cuModuleGetFunction(void **f, void *m, const char *name) { (void)name; *f = m; return OK; }
EXPORT int cuFuncGetAttribute(int *v, int what, void *f) { (void)f; *v = what ? 32 : 1024; return OK; }
EXPORT int cuFuncSetAttribute(void *f, int what, int v) { (void)f; (void)what; (void)v; return OK; }
EXPORT int cuFuncSetCacheConfig(void *f, int c) { (void)f; (void)c; return OK; }
EXPORT int cuPointerGetAttribute(void *v, int what, unsigned long long at) { (void)what; *(unsigned long long *)v = at; return OK; }
EXPORT int cuLaunchKernelEx(const void *c, void *f, void **p, void **e) { (void)c; (void)f; (void)p; (void)e; return OK; }
static int nothing(void) { return NOT_SUPPORTED; }
EXPORT int cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned v, unsigned long long flags, int *status) {
    (void)v; (void)flags;
    *f = dlsym(RTLD_DEFAULT, name);
    if (!*f) *f = (void *)nothing;
    if (status) *status = 0;
    return OK;
}
