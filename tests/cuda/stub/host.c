/* Registered host memory, and where an address lies; see stub.h. */
#define _GNU_SOURCE
#include "memory.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

typedef struct { uint64_t base; size_t nbytes; int id; } Pin; /* none: of no bytes */

static Pin pins[MAX_OBJECTS];
static int num_pins;
static int top_pin; /* no entry at or above was ever used: lookups are many, objects few */

static uint64_t alias(void) { return setting("attr", 91, 1) ? 0 : ALIAS; }

static Pin *touched(uint64_t base, size_t nbytes) /* by any of these host addresses */
{
    return FIND(pins, top_pin, e->nbytes && base < e->base + e->nbytes && e->base < base + nbytes);
}

static Pin *pin_at(uint64_t address) { return touched(address + alias(), 1); } /* as the device sees it */

const char *where(uint64_t address)
{
    static __thread char texts[8][64];
    static __thread int turn;
    char *text = texts[turn++ % 8];
    Memory *memory = memory_at(address);
    Pin *pin = memory ? NULL : pin_at(address);
    if (memory)
        snprintf(text, 64, "gpu%d+0x%llx", memory->id, (unsigned long long)(address - memory->base));
    else if (pin)
        snprintf(text, 64, "pin%d+0x%llx", pin->id, (unsigned long long)(address + alias() - pin->base));
    else
        snprintf(text, 64, "nowhere");
    return text;
}

void *pinned_range(uint64_t address, size_t nbytes)
{
    Pin *pin = pin_at(address);
    if (!pin && setting("pageable", -1, 0) && !memory_at(address)) /* but no copy runs into a registration */
        return touched(address, nbytes) ? NULL : (void *)address;
    address += alias();
    return pin && address + nbytes <= pin->base + pin->nbytes ? (void *)address : NULL;
}

size_t host_leaks(char *text, size_t size)
{
    size_t count = 0;
    *text = 0;
    for (Pin *pin = pins; pin < pins + top_pin; pin++)
        if (pin->nbytes)
            LEAK("pin%d, %zu bytes\n", pin->id, pin->nbytes);
    return count;
}

void end_host(void)
{
    lock();
    for (Pin *pin = pins; pin < pins + top_pin; pin++)
        pin->nbytes = 0;
    unlock();
}

/* ---- the entry points ---------------------------------------------------------------------------------------- */

static CUresult pin(const char *name, void *address, size_t nbytes, unsigned int flags)
{
    uint64_t base = (uint64_t)address;
    if (flags != 3 || !nbytes || nbytes > 1ull << 30)
        return violation(INVALID_VALUE, "%s of %zu bytes, flags %u", name, nbytes, flags);
    if (msync((void *)(base & ~4095ull), nbytes + (base & 4095), MS_ASYNC))
        return violation(INVALID_VALUE, "%s of memory that is not mapped", name);
    lock();
    Pin *pin = touched(base, nbytes) ? NULL : FIND(pins, MAX_OBJECTS, !e->nbytes);
    if (pin) {
        *pin = (Pin){base, nbytes, ++num_pins};
        top_pin = pin - pins < top_pin ? top_pin : (int)(pin - pins) + 1;
    }
    unlock();
    note("%s %zu flags 3 -> pin%d", name, nbytes, pin ? pin->id : 0);
    return pin ? OK : ALREADY_REGISTERED;
}

static Pin *pin_from(void *address) { return FIND(pins, top_pin, e->nbytes && e->base == (uint64_t)address); }

static CUresult unpin(const char *name, void *address)
{
    lock();
    Pin *pin = pin_from(address);
    int id = pin ? pin->id : 0;
    if (pin)
        pin->nbytes = 0;
    unlock();
    note("%s pin%d", name, id);
    return id ? OK : violation(NOT_REGISTERED, "%s of what is no registration's beginning", name);
}

CUresult cuMemHostRegister_v2(void *address, size_t nbytes, unsigned int flags)
{
    ENTER(1);
    return pin(__func__, address, nbytes, flags);
}

CUresult cuMemHostUnregister(void *address)
{
    ENTER(1);
    return unpin(__func__, address);
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *to, void *address, unsigned int flags)
{
    ENTER(1);
    *to = (uint64_t)address - alias();
    if (flags || !pin_at(*to))
        return violation(INVALID_VALUE, "cuMemHostGetDevicePointer_v2 of what is not registered, flags %u", flags);
    note("cuMemHostGetDevicePointer_v2 %s", where(*to));
    return OK;
}

CUresult cuMemHostAlloc(void **address, size_t nbytes, unsigned int flags)
{
    ENTER(1);
    *address = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return pin(__func__, *address, nbytes, flags);
}

CUresult cuMemFreeHost(void *address)
{
    ENTER(1);
    Pin *pin = pin_from(address);
    size_t nbytes = pin ? pin->nbytes : 0;
    CUresult result = unpin(__func__, address);
    if (!result)
        munmap(address, nbytes);
    return result;
}
