/* Device memory in parts: allocations behind handles, reserved addresses, and what is mapped there; see stub.h. */
#define _GNU_SOURCE
#include "memory.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define GRAIN (2ull << 20)   /* of all of it */
#define FIRST_HANDLE 1000ull /* a handle is its allocation's index from here on */

typedef struct { int live, device, fd, exportable, users; size_t nbytes; } Allocation; /* behind a handle */
typedef struct { uint64_t base; size_t nbytes; int live, mapped; } Reservation;

static Allocation allocations[MAX_OBJECTS];
static Reservation reservations[MAX_OBJECTS];

size_t mapped_leaks(char *text, size_t size)
{
    size_t count = 0;
    *text = 0;
    for (int i = 0; i < MAX_OBJECTS; i++) {
        if (allocations[i].live)
            LEAK("allocation handle of %zu bytes\n", allocations[i].nbytes);
        if (reservations[i].live)
            LEAK("addresses of %zu bytes\n", reservations[i].nbytes);
    }
    return count;
}

void end_mapped(void)
{
    lock();
    for (int i = 0; i < MAX_OBJECTS; i++) {
        if (allocations[i].live)
            close(allocations[i].fd);
        allocations[i].live = reservations[i].live = 0;
    }
    unlock();
}

/* ---- allocations and their handles --------------------------------------------------------------------------- */

static Allocation *behind(CUhandle handle) { return &allocations[handle - FIRST_HANDLE]; }

int is_exportable(const Memory *memory) { return memory->kind == MAPPED && behind(memory->handle)->exportable; }

static Allocation *known_allocation(const char *name, CUhandle handle)
{
    if (handle >= FIRST_HANDLE && handle < FIRST_HANDLE + MAX_OBJECTS && behind(handle)->live)
        return behind(handle);
    violation(INVALID_VALUE, "%s of a handle that is none", name);
    return NULL;
}

/* The allocation behind an entry point's handle. */
#define ALLOCATION(name, handle)                                 \
    Allocation *name = known_allocation(__func__, handle);       \
    if (!name)                                                   \
        return INVALID_VALUE

static CUhandle new_handle(Allocation made)
{
    lock();
    Allocation *allocation = FIND(allocations, MAX_OBJECTS, !e->live);
    *allocation = made;
    unlock();
    return FIRST_HANDLE + (CUhandle)(allocation - allocations);
}

static void unuse(Allocation *allocation) /* with the lock: it ends when nobody holds or maps it any more */
{
    if (!--allocation->users) {
        close(allocation->fd);
        allocation->live = 0;
    }
}

static CUresult check_prop(const CUmemAllocationProp *prop)
{
    if (prop->type != 1 || prop->location.type != 1 || prop->location.id < 0 || prop->location.id >= 8)
        return violation(INVALID_VALUE, "an allocation of type %d at %d,%d", prop->type, prop->location.type, prop->location.id);
    if (prop->requestedHandleTypes & ~1 || prop->win32HandleMetaData || prop->allocFlags.usage)
        return violation(INVALID_VALUE, "an allocation with handle types %d", prop->requestedHandleTypes);
    return OK;
}

CUresult cuMemGetAllocationGranularity(size_t *nbytes, const CUmemAllocationProp *prop, int option)
{
    ENTER(0);
    *nbytes = GRAIN;
    return option ? violation(INVALID_VALUE, "granularity %d", option) : check_prop(prop);
}

CUresult cuMemCreate(CUhandle *handle, size_t nbytes, const CUmemAllocationProp *prop, unsigned long long flags)
{
    ENTER(0);
    CUresult wrong = check_prop(prop);
    if (wrong)
        return wrong;
    if (flags || !nbytes || nbytes % GRAIN)
        return violation(INVALID_VALUE, "cuMemCreate of %zu bytes, flags %llu", nbytes, flags);
    int fd = new_fd("stubcuda-vmm", nbytes);
    *handle = new_handle((Allocation){1, prop->location.id, fd, prop->requestedHandleTypes & 1, 1, nbytes});
    note("cuMemCreate %zu handle types %d", nbytes, prop->requestedHandleTypes);
    return OK;
}

CUresult cuMemRelease(CUhandle handle)
{
    ENTER(0);
    ALLOCATION(allocation, handle);
    lock();
    unuse(allocation);
    unlock();
    note("cuMemRelease");
    return OK;
}

CUresult cuMemRetainAllocationHandle(CUhandle *handle, void *address)
{
    ENTER(0);
    Memory *memory = memory_at((uint64_t)address);
    if (!memory || memory->kind != MAPPED)
        return INVALID_VALUE;
    *handle = memory->handle;
    lock();
    behind(*handle)->users++;
    unlock();
    note("cuMemRetainAllocationHandle of %s", where((uint64_t)address));
    return OK;
}

CUresult cuMemExportToShareableHandle(void *to, CUhandle handle, int type, unsigned long long flags)
{
    ENTER(0);
    ALLOCATION(allocation, handle);
    if (type != 1 || flags)
        return violation(INVALID_VALUE, "export as type %d, flags %llu", type, flags);
    if (!allocation->exportable)
        return INVALID_VALUE;
    *(int *)to = fcntl(allocation->fd, F_DUPFD_CLOEXEC, 3);
    note("cuMemExportToShareableHandle type 1");
    return OK;
}

CUresult cuMemImportFromShareableHandle(CUhandle *handle, void *from, int type)
{
    ENTER(0);
    char path[64], target[128] = "";
    struct stat info;
    if (type != 1 || (uint64_t)from > 1 << 20)
        return violation(INVALID_VALUE, "import of %p as type %d: a descriptor goes by value", from, type);
    snprintf(path, sizeof path, "/proc/self/fd/%d", (int)(uint64_t)from);
    if (readlink(path, target, sizeof target - 1) < 0 || !strstr(target, "stubcuda-vmm") || stat(path, &info))
        return INVALID_VALUE;
    int fd = fcntl((int)(uint64_t)from, F_DUPFD_CLOEXEC, 3);
    *handle = new_handle((Allocation){1, current_device(), fd, 1, 1, (size_t)info.st_size});
    note("cuMemImportFromShareableHandle type 1");
    return OK;
}

/* ---- addresses and mappings ---------------------------------------------------------------------------------- */

static Reservation *reservation_of(uint64_t base, size_t nbytes)
{
    return FIND(reservations, MAX_OBJECTS, e->live && e->base == base && e->nbytes == nbytes);
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t nbytes, size_t alignment, CUdeviceptr hint, unsigned long long flags)
{
    ENTER(0);
    if (alignment || hint || flags || !nbytes || nbytes % GRAIN)
        return violation(INVALID_VALUE, "cuMemAddressReserve of %zu, %zu, %llu, %llu", nbytes, alignment,
                         (unsigned long long)hint, flags);
    void *at = mmap(NULL, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    lock();
    Reservation *reservation = FIND(reservations, MAX_OBJECTS, !e->live);
    *reservation = (Reservation){(uint64_t)at, nbytes, 1, 0};
    unlock();
    *address = (uint64_t)at;
    note("cuMemAddressReserve %zu", nbytes);
    return OK;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t nbytes)
{
    ENTER(0);
    lock();
    Reservation *reservation = reservation_of(address, nbytes);
    int free = reservation && !reservation->mapped;
    if (free) {
        munmap((void *)address, nbytes);
        reservation->live = 0;
    }
    unlock();
    note("cuMemAddressFree %zu", nbytes);
    return free ? OK : violation(INVALID_VALUE, "cuMemAddressFree of what is not reserved, or still mapped");
}

CUresult cuMemMap(CUdeviceptr address, size_t nbytes, size_t offset, CUhandle handle, unsigned long long flags)
{
    ENTER(0);
    ALLOCATION(allocation, handle);
    if (offset || flags || nbytes % GRAIN)
        return violation(INVALID_VALUE, "cuMemMap of %zu bytes at %zu, flags %llu", nbytes, offset, flags);
    if (nbytes > allocation->nbytes)
        return INVALID_VALUE;
    lock();
    Reservation *reservation = reservation_of(address, nbytes);
    Memory *memory = NULL;
    if (reservation && !reservation->mapped) {
        mmap((void *)address, nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, allocation->fd, 0);
        memory = new_memory(MAPPED, address, nbytes, -1);
        memory->handle = handle;
        allocation->users++;
        reservation->mapped = 1;
    }
    unlock();
    note("cuMemMap %zu -> %s", nbytes, where(address));
    return memory ? OK : violation(INVALID_VALUE, "cuMemMap of what is not reserved, or mapped already");
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t nbytes, const CUmemAccessDesc *access, size_t count)
{
    ENTER(0);
    Memory *memory = memory_at(address);
    if (!memory || memory->kind != MAPPED || memory->base != address || memory->nbytes != nbytes)
        return violation(INVALID_VALUE, "cuMemSetAccess of what is not mapped so");
    if (count != 1 || access->location.type != 1 || access->flags != 3)
        return violation(INVALID_VALUE, "cuMemSetAccess with %zu entries, type %d, flags %d", count, access->location.type,
                         access->flags);
    mprotect((void *)address, nbytes, PROT_READ | PROT_WRITE);
    memory->allowed = 1;
    note("cuMemSetAccess gpu%d device %d read and write", memory->id, access->location.id);
    return OK;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t nbytes)
{
    ENTER(0);
    lock();
    Reservation *reservation = reservation_of(address, nbytes);
    Memory *memory = memory_at(address);
    int mapped = reservation && reservation->mapped && memory && memory->kind == MAPPED && memory->nbytes == nbytes;
    int id = memory ? memory->id : 0;
    if (mapped) {
        mmap((void *)address, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
        reservation->mapped = 0;
        memory->kind = FREE;
        unuse(behind(memory->handle));
    }
    unlock();
    note("cuMemUnmap gpu%d", id);
    return mapped ? OK : violation(INVALID_VALUE, "cuMemUnmap of what is not mapped so");
}
