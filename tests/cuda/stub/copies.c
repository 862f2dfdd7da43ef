/* Streams, events and copies: each stream is a thread that works off what is queued; see stub.h. */
#define _GNU_SOURCE
#include "stub.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct Event {
    int live, id, flags, waiters;
    uint64_t recorded, happened;
} Event;

typedef struct Op {
    struct Op *next;
    enum { COPIES, HAPPENS, WRITES, ENDS } what;
    size_t count;
    uint64_t *dst, *src, *size;
    Event *event;
    uint64_t number, address;
} Op;

typedef struct {
    int live, id, busy;
    Op *first, **last;
    pthread_t thread;
} Stream;

static Stream streams[MAX_OBJECTS];
static Event events[MAX_OBJECTS];
static int num_streams, num_events;
static pthread_mutex_t queues = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;

/* With the queues' lock: sleep as long as `condition` holds. */
#define WAIT_WHILE(condition) \
    while (condition)         \
    pthread_cond_wait(&moved, &queues)

size_t copy_leaks(char *text, size_t size)
{
    size_t count = 0;
    *text = 0;
    for (int i = 0; i < MAX_OBJECTS; i++) {
        if (streams[i].live)
            LEAK("stream%d\n", streams[i].id);
        if (events[i].live)
            LEAK("event%d\n", events[i].id);
    }
    return count;
}

/* ---- the GPU's side ------------------------------------------------------------------------------------------ */

static int run_copy(uint64_t dst, uint64_t src, size_t size)
{
    int to_host = !device_range(dst, size);
    void *to = to_host ? pinned_range(dst, size) : (void *)dst;
    void *from = to_host ? (device_range(src, size) ? (void *)src : NULL) : pinned_range(src, size);
    if (!to || !from)
        return violation(ILLEGAL_ADDRESS, "a copy that is running touches memory that was let go");
    memcpy(to, from, size);
    return OK;
}

static void run(Op *op)
{
    int result = OK;
    if (op->what == COPIES) {
        result = gpu_work();
        for (size_t i = 0; !result && !stub_sticky && i < op->count; i++)
            result = run_copy(op->dst[i], op->src[i], op->size[i]);
    }
    if (op->what == WRITES) {
        uint64_t *word = pinned_range(op->address, 8);
        if (!word)
            violation(OK, "a stream writes to memory that was let go");
        else
            __atomic_store_n(word, op->number, __ATOMIC_SEQ_CST);
    }
    if (result)
        stub_sticky = result; /* what goes wrong on the GPU is wrong for good */
}

static void *work(void *argument)
{
    Stream *stream = argument;
    pthread_mutex_lock(&queues);
    for (;;) {
        WAIT_WHILE(!stream->first);
        Op *op = stream->first;
        stream->busy = 1;
        pthread_mutex_unlock(&queues);
        run(op);
        pthread_mutex_lock(&queues);
        if (!(stream->first = op->next))
            stream->last = &stream->first;
        stream->busy = 0;
        if (op->what == HAPPENS)
            op->event->happened = op->number;
        int ends = op->what == ENDS;
        free(op->dst);
        free(op);
        pthread_cond_broadcast(&moved);
        if (ends) {
            stream->live = 0;
            pthread_mutex_unlock(&queues);
            return NULL;
        }
    }
}

static void queue(Stream *stream, Op op)
{
    Op *copy = malloc(sizeof op);
    *copy = op;
    copy->next = NULL;
    pthread_mutex_lock(&queues);
    *stream->last = copy;
    stream->last = &copy->next;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&queues);
}

void end_copies(void) /* what is queued still runs, as it is the stub's own and short */
{
    for (int i = 0; i < MAX_OBJECTS; i++)
        if (streams[i].live)
            queue(&streams[i], (Op){.what = ENDS});
    pthread_mutex_lock(&queues);
    for (int i = 0; i < MAX_OBJECTS; i++) {
        WAIT_WHILE(streams[i].live);
        events[i].live = 0;
    }
    pthread_mutex_unlock(&queues);
}

/* ---- streams ------------------------------------------------------------------------------------------------- */

static Stream *known_stream(const char *name, CUstream stream)
{
    Stream *known = FIND(streams, MAX_OBJECTS, e->live && e == stream);
    if (!known)
        violation(INVALID_VALUE, stream ? "%s on a stream that is none" : "%s on the null stream", name);
    return known;
}

/* The stream behind an entry point's handle. */
#define STREAM(name, handle)                        \
    Stream *name = known_stream(__func__, handle);  \
    if (!name)                                      \
        return INVALID_VALUE

CUresult cuStreamCreate(CUstream *to, unsigned int flags)
{
    ENTER(1);
    if (flags != 1)
        return violation(INVALID_VALUE, "cuStreamCreate with flags %u: it would wait for the null stream", flags);
    pthread_mutex_lock(&queues);
    Stream *stream = FIND(streams, MAX_OBJECTS, !e->live);
    *stream = (Stream){1, ++num_streams, 0, NULL, NULL, 0};
    stream->last = &stream->first;
    pthread_mutex_unlock(&queues);
    pthread_create(&stream->thread, NULL, work, stream);
    pthread_detach(stream->thread);
    *to = stream;
    note("cuStreamCreate flags 1 -> stream%d", stream->id);
    return OK;
}

CUresult cuStreamDestroy_v2(CUstream handle)
{
    ENTER(1);
    STREAM(stream, handle);
    note("cuStreamDestroy_v2 stream%d", stream->id);
    queue(stream, (Op){.what = ENDS});
    pthread_mutex_lock(&queues);
    WAIT_WHILE(stream->live);
    pthread_mutex_unlock(&queues);
    return OK;
}

CUresult cuStreamQuery(CUstream handle)
{
    ENTER(1);
    STREAM(stream, handle);
    return stream->first ? NOT_READY : OK;
}

CUresult cuStreamSynchronize(CUstream handle)
{
    ENTER(1);
    STREAM(stream, handle);
    pthread_mutex_lock(&queues);
    WAIT_WHILE(stream->first);
    pthread_mutex_unlock(&queues);
    note("cuStreamSynchronize stream%d", stream->id);
    return stub_sticky;
}

CUresult cuStreamWriteValue64_v2(CUstream handle, CUdeviceptr address, uint64_t value, unsigned int flags)
{
    ENTER(1);
    STREAM(stream, handle);
    if (flags || address % 8 || !pinned_range(address, 8))
        return violation(INVALID_VALUE, "cuStreamWriteValue64_v2 at %s, flags %u", where(address), flags);
    note("cuStreamWriteValue64_v2 stream%d %s = %llu", stream->id, where(address), (unsigned long long)value);
    queue(stream, (Op){.what = WRITES, .address = address, .number = value});
    return OK;
}

/* ---- events -------------------------------------------------------------------------------------------------- */

static Event *known_event(const char *name, CUevent event)
{
    Event *known = FIND(events, MAX_OBJECTS, e->live && e == event);
    if (!known)
        violation(INVALID_HANDLE, "%s of an event that is none", name);
    return known;
}

/* The event behind an entry point's handle. */
#define EVENT(name, handle)                       \
    Event *name = known_event(__func__, handle);  \
    if (!name)                                    \
        return INVALID_HANDLE

static int is_pending(const Event *event) { return event->happened != event->recorded; }

CUresult cuEventCreate(CUevent *to, unsigned int flags)
{
    ENTER(1);
    if (flags & ~3u || !(flags & 2))
        return violation(INVALID_VALUE, "cuEventCreate with flags %u", flags);
    lock();
    Event *event = FIND(events, MAX_OBJECTS, !e->live);
    *event = (Event){1, ++num_events, (int)flags, 0, 0, 0};
    unlock();
    *to = event;
    note("cuEventCreate flags %u -> event%d", flags, event->id);
    return OK;
}

CUresult cuEventDestroy_v2(CUevent handle)
{
    ENTER(1);
    EVENT(event, handle);
    if (event->waiters || is_pending(event))
        return violation(INVALID_HANDLE, "event%d is destroyed before it has happened", event->id);
    event->live = 0;
    note("cuEventDestroy_v2 event%d", event->id);
    return OK;
}

CUresult cuEventRecord(CUevent handle, CUstream on)
{
    ENTER(1);
    EVENT(event, handle);
    STREAM(stream, on);
    if (is_pending(event))
        return violation(INVALID_HANDLE, "event%d is recorded anew before it has happened", event->id);
    note("cuEventRecord event%d stream%d", event->id, stream->id);
    queue(stream, (Op){.what = HAPPENS, .event = event, .number = ++event->recorded});
    return OK;
}

CUresult cuEventQuery(CUevent handle)
{
    ENTER(1);
    EVENT(event, handle);
    pthread_mutex_lock(&queues);
    int pending = is_pending(event);
    pthread_mutex_unlock(&queues);
    return pending ? NOT_READY : stub_sticky;
}

CUresult cuEventSynchronize(CUevent handle)
{
    ENTER(1);
    EVENT(event, handle);
    if (!(event->flags & 1))
        violation(OK, "event%d is waited for and would spin", event->id);
    pthread_mutex_lock(&queues);
    event->waiters++;
    WAIT_WHILE(is_pending(event));
    event->waiters--;
    pthread_mutex_unlock(&queues);
    note("cuEventSynchronize event%d", event->id);
    return stub_sticky;
}

/* ---- copies -------------------------------------------------------------------------------------------------- */

static CUresult check_copy(uint64_t dst, uint64_t src, size_t size)
{
    if (!size)
        return violation(INVALID_VALUE, "a copy of no bytes");
    if ((device_range(dst, size) && pinned_range(src, size)) || (pinned_range(dst, size) && device_range(src, size)))
        return OK;
    return violation(INVALID_VALUE, "a copy of %zu bytes from %s to %s leaves its memory", size, where(src), where(dst));
}

static int by_start(const void *one, const void *other)
{
    uint64_t a = **(uint64_t *const *)one, b = **(uint64_t *const *)other;
    return (a > b) - (a < b);
}

static CUresult check_apart(const uint64_t *dst, const size_t *size, size_t count)
{
    const uint64_t **order = malloc(count * sizeof *order);
    CUresult result = OK;
    for (size_t i = 0; i < count; i++)
        order[i] = &dst[i];
    qsort(order, count, sizeof *order, by_start);
    for (size_t i = 1; i < count && !result; i++)
        if (*order[i - 1] + size[order[i - 1] - dst] > *order[i])
            result = violation(INVALID_VALUE, "two copies of a batch write one byte");
    free(order);
    return result;
}

static void queue_copies(Stream *stream, const uint64_t *dst, const uint64_t *src, const size_t *size, size_t count)
{
    uint64_t *columns = malloc(3 * count * sizeof *columns);
    memcpy(columns, dst, count * 8);
    memcpy(columns + count, src, count * 8);
    memcpy(columns + 2 * count, size, count * 8);
    queue(stream, (Op){.what = COPIES, .count = count, .dst = columns, .src = columns + count, .size = columns + 2 * count});
}

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t size, CUstream handle)
{
    ENTER(1);
    STREAM(stream, handle);
    CUresult wrong = check_copy(dst, src, size);
    if (wrong)
        return wrong;
    note("cuMemcpyAsync stream%d %s -> %s %zu", stream->id, where(src), where(dst), size);
    queue_copies(stream, &dst, &src, &size, 1);
    return OK;
}

/* As of 12.8: nine arguments. */
CUresult cuMemcpyBatchAsync(CUdeviceptr *dst, CUdeviceptr *src, size_t *size, size_t count, CUmemcpyAttributes *attributes,
                            size_t *first, size_t num_attributes, size_t *failed, CUstream handle)
{
    ENTER(1);
    STREAM(stream, handle);
    if (!count || count > 4096 || num_attributes != 1 || *first || !failed)
        return violation(INVALID_VALUE, "a batch of %zu copies with %zu attributes", count, num_attributes);
    if ((attributes->srcAccessOrder != 1 && attributes->srcAccessOrder != 3) || attributes->flags > 1 ||
        attributes->srcLocHint.type || attributes->dstLocHint.type)
        return violation(INVALID_VALUE, "a batch of order %d, flags %u", attributes->srcAccessOrder, attributes->flags);
    CUresult wrong = OK;
    for (size_t i = 0; i < count && !wrong; i++)
        if ((wrong = check_copy(dst[i], src[i], size[i])))
            *failed = i;
    if (wrong || (wrong = check_apart(dst, size, count)))
        return wrong;
    note("cuMemcpyBatchAsync stream%d count %zu order %d flags %u: %s -> %s %zu%s", stream->id, count,
         attributes->srcAccessOrder, attributes->flags, where(src[0]), where(dst[0]), size[0], count > 1 ? " ..." : "");
    queue_copies(stream, dst, src, size, count);
    return OK;
}

/* As of 13.0: eight. Whoever gets this one under the plain name calls it with the wrong arguments. */
CUresult cuMemcpyBatchAsync_v2(void)
{
    return violation(INVALID_VALUE, "cuMemcpyBatchAsync of 13.0 was called; its arguments are others");
}

CUresult cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status)
{
    long driver = setting("driver", -1, 13000);
    *found = NULL;
    *status = 1;
    if (flags || strcmp(name, "cuMemcpyBatchAsync"))
        return violation(NOT_FOUND, "cuGetProcAddress_v2 of %s, flags %llu", name, (unsigned long long)flags);
    if (version < 12080 || driver < 12080) {
        *status = 2;
        return NOT_FOUND;
    }
    *found = version < 13000 ? (void *)cuMemcpyBatchAsync : (void *)cuMemcpyBatchAsync_v2;
    *status = 0;
    note("cuGetProcAddress_v2 %s %d", name, version);
    return OK;
}
