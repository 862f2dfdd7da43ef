/* Control, journal, devices and contexts of the stub driver; see stub.h. */
#define _GNU_SOURCE
#include "stub.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAX_RULES 64

typedef struct {
    char name[64], verb[16];
    long value, after, times, seen;
} Rule;

int stub_sticky;
static pthread_mutex_t tables = PTHREAD_MUTEX_INITIALIZER, control_lock = PTHREAD_MUTEX_INITIALIZER;
static Rule rules[MAX_RULES];
static int num_rules, num_violations, initialised, journal_fd = -2, given_control;
static struct timespec control_time;
static off_t control_size = -1;
static int context_refs[8], context_flags[8];
static char contexts[8]; /* their addresses are the contexts */
static __thread CUcontext current;

void lock(void) { pthread_mutex_lock(&tables); }
void unlock(void) { pthread_mutex_unlock(&tables); }

/* ---- journal ------------------------------------------------------------------------------------------------ */

static void put(const char *line)
{
    if (journal_fd == -2) {
        const char *path = getenv("STUBCUDA_JOURNAL");
        char own[512];
        journal_fd = -1;
        if (path) {
            snprintf(own, sizeof own, "%s.%d", path, (int)getpid());
            journal_fd = open(own, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        }
    }
    if (journal_fd >= 0 && write(journal_fd, line, strlen(line)) < 0)
        abort();
}

static void say(const char *kind, const char *format, va_list arguments)
{
    char text[1024], line[1200];
    vsnprintf(text, sizeof text, format, arguments);
    const char *who = syscall(SYS_gettid) == getpid() ? "main" : "thread";
    snprintf(line, sizeof line, "%s %s%s\n", who, kind, text);
    put(line);
}

void note(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    say("", format, arguments);
    va_end(arguments);
}

CUresult violation(CUresult result, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    say("VIOLATION ", format, arguments);
    va_end(arguments);
    __atomic_add_fetch(&num_violations, 1, __ATOMIC_SEQ_CST);
    return result;
}

/* ---- control ------------------------------------------------------------------------------------------------ */

static void parse(char *text)
{
    num_rules = 0;
    for (char *rest = text, *line; (line = strsep(&rest, "\n")) && num_rules < MAX_RULES;) {
        Rule rule = {.times = 1L << 40};
        char *words[8] = {0};
        int n = 0;
        for (char *word; n < 8 && (word = strsep(&line, " "));)
            if (*word)
                words[n++] = word;
        if (n < 2)
            continue;
        snprintf(rule.name, sizeof rule.name, "%s", words[0]);
        snprintf(rule.verb, sizeof rule.verb, "%s", words[1]);
        int at = 2;
        if (n > 2 && strcmp(words[2], "after") && strcmp(words[2], "times"))
            rule.value = atol(words[at++]);
        for (; at + 1 < n; at += 2) {
            if (!strcmp(words[at], "after"))
                rule.after = atol(words[at + 1]);
            if (!strcmp(words[at], "times"))
                rule.times = atol(words[at + 1]);
        }
        rules[num_rules++] = rule;
    }
}

static void reload(void) /* with control_lock */
{
    const char *path = getenv("STUBCUDA_CONTROL");
    struct stat info;
    char text[4096];
    if (given_control || !path)
        return;
    if (stat(path, &info)) {
        num_rules = 0;
        control_size = -1;
        return;
    }
    if (info.st_size == control_size && !memcmp(&info.st_mtim, &control_time, sizeof control_time))
        return;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    if (got < 0)
        return;
    text[got] = 0;
    control_size = info.st_size;
    control_time = info.st_mtim;
    parse(text);
}

void stub_control(const char *text)
{
    char copy[4096];
    snprintf(copy, sizeof copy, "%s", text);
    pthread_mutex_lock(&control_lock);
    given_control = 1;
    parse(copy);
    pthread_mutex_unlock(&control_lock);
}

/* The verb that applies to this call of `name` now; its value. Counts the call if `counts`. */
static int rule_for(const char *name, int counts, char *verb, long *value)
{
    int found = 0;
    pthread_mutex_lock(&control_lock);
    reload();
    for (int i = 0; i < num_rules; i++) {
        Rule *rule = &rules[i];
        if (strcmp(rule->name, name))
            continue;
        rule->seen += counts;
        if (!found && rule->seen > rule->after && rule->seen <= rule->after + rule->times) {
            strcpy(verb, rule->verb);
            *value = rule->value;
            found = 1;
        }
    }
    pthread_mutex_unlock(&control_lock);
    return found;
}

long setting(const char *kind, long number, long otherwise)
{
    char text[32];
    long found = otherwise;
    snprintf(text, sizeof text, "%ld", number);
    pthread_mutex_lock(&control_lock);
    reload();
    for (int i = 0; i < num_rules; i++) {
        if (strcmp(rules[i].name, kind))
            continue;
        if (number < 0)
            found = atol(rules[i].verb);
        else if (!strcmp(rules[i].verb, text))
            found = rules[i].value;
    }
    pthread_mutex_unlock(&control_lock);
    return found;
}

static CUresult apply(const char *name)
{
    char verb[16];
    long value = 0;
    if (!rule_for(name, 1, verb, &value))
        return OK;
    if (!strcmp(verb, "fail"))
        return (CUresult)value;
    if (!strcmp(verb, "delay"))
        usleep((useconds_t)value * 1000);
    if (!strcmp(verb, "hang")) {
        while (rule_for(name, 0, verb, &value) && !strcmp(verb, "hang"))
            usleep(1000);
        return apply(name); /* what control says by now */
    }
    return OK;
}

CUresult gpu_work(void) { return apply("copy"); }

CUresult enter(const char *name, int needs_context)
{
    if (!initialised)
        return violation(NOT_INITIALIZED, "%s before cuInit", name);
    if (needs_context && !current)
        return violation(INVALID_CONTEXT, "%s in a thread without a context", name);
    CUresult result = apply(name);
    if (!result && stub_sticky)
        result = stub_sticky;
    if (result)
        note("%s -> %d", name, result);
    return result;
}

/* ---- questions ---------------------------------------------------------------------------------------------- */

int stub_violations(void) { return num_violations; }

void stub_journal(const char *path)
{
    if (journal_fd >= 0)
        close(journal_fd);
    journal_fd = path && *path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
}

size_t stub_leaks(char *text, size_t size)
{
    size_t (*const rooms[])(char *, size_t) = {memory_leaks, mapped_leaks, host_leaks, copy_leaks};
    size_t count = 0;
    *text = 0;
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++)
        count += rooms[i](text + strlen(text), size - strlen(text));
    for (int i = 0; i < 8; i++) {
        count += (size_t)context_refs[i];
        if (context_refs[i])
            snprintf(text + strlen(text), size - strlen(text), "context of device %d, %d times\n", i, context_refs[i]);
    }
    return count;
}

void stub_reset(void)
{
    stub_control("");
    num_violations = 0;
    stub_sticky = 0;
}

void stub_end_process(void)
{
    end_copies();
    end_memory();
    end_mapped();
    end_host();
    memset(context_refs, 0, sizeof context_refs);
}

long stub_sizeof(const char *name)
{
    struct { const char *name; size_t size; } sizes[] = {
        {"CUuuid", sizeof(CUuuid)}, {"CUipcMemHandle", sizeof(CUipcMemHandle)}, {"CUmemLocation", sizeof(CUmemLocation)},
        {"CUmemAllocationProp", sizeof(CUmemAllocationProp)}, {"CUmemAccessDesc", sizeof(CUmemAccessDesc)},
        {"CUmemcpyAttributes", sizeof(CUmemcpyAttributes)},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (!strcmp(sizes[i].name, name))
            return (long)sizes[i].size;
    return -1;
}

/* ---- the driver --------------------------------------------------------------------------------------------- */

CUresult cuInit(unsigned int flags)
{
    if (flags)
        return violation(INVALID_VALUE, "cuInit of flags %u", flags);
    CUresult result = apply("cuInit");
    note("cuInit -> %d", result);
    initialised = !result;
    return result;
}

CUresult cuDriverGetVersion(int *version)
{
    *version = (int)setting("driver", -1, 13000);
    return OK;
}

CUresult cuGetErrorName(CUresult error, const char **text)
{
    static const struct { int code; const char *name; } names[] = {
        {OK, "CUDA_SUCCESS"}, {1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"},
        {3, "CUDA_ERROR_NOT_INITIALIZED"}, {100, "CUDA_ERROR_NO_DEVICE"}, {101, "CUDA_ERROR_INVALID_DEVICE"},
        {201, "CUDA_ERROR_INVALID_CONTEXT"}, {205, "CUDA_ERROR_MAP_FAILED"}, {304, "CUDA_ERROR_OPERATING_SYSTEM"},
        {400, "CUDA_ERROR_INVALID_HANDLE"}, {500, "CUDA_ERROR_NOT_FOUND"}, {600, "CUDA_ERROR_NOT_READY"},
        {700, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
        {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"}, {719, "CUDA_ERROR_LAUNCH_FAILED"},
        {800, "CUDA_ERROR_NOT_PERMITTED"}, {801, "CUDA_ERROR_NOT_SUPPORTED"}, {999, "CUDA_ERROR_UNKNOWN"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].code == error) {
            *text = names[i].name;
            return OK;
        }
    *text = NULL;
    return INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char **text)
{
    CUresult result = cuGetErrorName(error, text);
    if (!result)
        *text = "as the stub was told";
    return result;
}

static int num_devices(void) { return (int)setting("devices", -1, 1); }

/* The first line of an entry point about a device. */
#define DEVICE(device)                                                             \
    ENTER(0);                                                                      \
    if ((device) < 0 || (device) >= num_devices())                                 \
        return violation(INVALID_DEVICE, "%s of device %d", __func__, device)

CUresult cuDeviceGetCount(int *count)
{
    ENTER(0);
    *count = num_devices();
    return OK;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    DEVICE(ordinal);
    *device = ordinal;
    return OK;
}

CUresult cuDeviceGetName(char *name, int size, CUdevice device)
{
    DEVICE(device);
    snprintf(name, (size_t)size, "Stub GPU");
    return OK;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    DEVICE(device);
    memset(uuid->bytes, 0x5b, sizeof uuid->bytes);
    uuid->bytes[15] = (char)device;
    return OK;
}

CUresult cuDeviceGetPCIBusId(char *text, int size, CUdevice device)
{
    DEVICE(device);
    snprintf(text, (size_t)size, "0000:%02X:00.0", 0x3b + device);
    return OK;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    static const struct { int number, value; } usual[] = {{20, 0},  {40, 3},  {91, 1},   {99, 1},  {102, 1},
                                                          {103, 1}, {122, 1}, {125, 1}, {134, 0}};
    DEVICE(device);
    for (size_t i = 0; i < sizeof usual / sizeof *usual; i++)
        if (usual[i].number == attribute) {
            *value = (int)setting("attr", attribute, usual[i].value);
            return OK;
        }
    return violation(INVALID_VALUE, "attribute %d is none that the stub knows", attribute);
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags)
{
    DEVICE(device);
    if (context_refs[device])
        violation(OK, "the flags of a context that is there already");
    context_flags[device] = (int)flags;
    note("cuDevicePrimaryCtxSetFlags_v2 device %d flags %u", device, flags);
    return OK;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    DEVICE(device);
    context_refs[device]++;
    *context = &contexts[device];
    note("cuDevicePrimaryCtxRetain device %d", device);
    return OK;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    DEVICE(device);
    if (context_refs[device] < 1)
        return violation(INVALID_CONTEXT, "a context is released more often than retained");
    context_refs[device]--;
    note("cuDevicePrimaryCtxRelease_v2 device %d", device);
    return OK;
}

CUresult cuCtxSetCurrent(CUcontext context)
{
    ENTER(0);
    long device = (char *)context - contexts;
    if (context && (device < 0 || device >= 8 || !context_refs[device]))
        return violation(INVALID_CONTEXT, "a context that nobody retains is made current");
    current = context;
    note("cuCtxSetCurrent %s", context ? "primary" : "none");
    return OK;
}

CUresult cuCtxGetCurrent(CUcontext *context)
{
    *context = current;
    return OK;
}

int current_device(void) { return (int)((char *)current - contexts); }

CUresult cuCtxGetDevice(CUdevice *device)
{
    ENTER(1);
    *device = current_device();
    return OK;
}
