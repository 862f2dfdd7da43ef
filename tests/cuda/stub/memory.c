/* Device memory (memfds), what is exported and imported of it, and registered host memory; see stub.h. */
#define _GNU_SOURCE
#include "stub.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define GRAIN (2ull << 20) /* of mapped allocations */

enum { FREE, PLAIN, OPENED, MAPPED };

typedef struct { /* device memory at an address */
    int kind, id, device, fd, users, allowed;
    uint64_t base;
    size_t nbytes;
    CUipcMemHandle blob; /* of OPENED */
    CUhandle handle;     /* of MAPPED */
} Memory;

typedef struct { int live, device, fd, exportable, users; size_t nbytes; } Allocation; /* behind a handle */
typedef struct { uint64_t base; size_t nbytes; int live, mapped; } Reservation;
typedef struct { uint64_t base; size_t nbytes; int id; } Pin;

typedef struct { /* the 64 bytes of an exported handle */
    char magic[8];
    int pid, fd, device, pad;
    uint64_t nbytes, inode;
    char rest[24];
} Blob;

static Memory memories[MAX_OBJECTS];
static Allocation allocations[MAX_OBJECTS]; /* a handle is its index + 1000 */
static Reservation reservations[MAX_OBJECTS];
static Pin pins[MAX_OBJECTS];
static int num_memories, num_pins;
static int top_memory, top_pin; /* no entry at or above was ever used: lookups are many, objects few */
_Static_assert(sizeof(Blob) == sizeof(CUipcMemHandle), "a handle has 64 bytes");

/* ---- looking up (with or without the lock: entries are written before they count) ------------------------------ */

static Memory *memory_at(uint64_t address)
{
    for (int i = 0; i < top_memory; i++)
        if (memories[i].kind && address >= memories[i].base && address < memories[i].base + memories[i].nbytes)
            return &memories[i];
    return NULL;
}

static uint64_t alias(void) { return setting("attr", 91, 1) ? 0 : ALIAS; }

static Pin *pin_at(uint64_t address) /* as the device sees it */
{
    address += alias();
    for (int i = 0; i < top_pin; i++)
        if (pins[i].nbytes && address >= pins[i].base && address < pins[i].base + pins[i].nbytes)
            return &pins[i];
    return NULL;
}

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

int device_range(uint64_t address, size_t nbytes)
{
    Memory *memory = memory_at(address);
    return memory && address + nbytes <= memory->base + memory->nbytes && (memory->kind != MAPPED || memory->allowed);
}

void *pinned_range(uint64_t address, size_t nbytes)
{
    Pin *pin = pin_at(address);
    if (!pin && setting("pageable", -1, 0) && !memory_at(address))
        return (void *)address;
    address += alias();
    return pin && address + nbytes <= pin->base + pin->nbytes ? (void *)address : NULL;
}

size_t memory_leaks(char *text, size_t size)
{
    size_t count = 0;
    *text = 0;
#define LEAK(...) (count++, snprintf(text + strlen(text), size - strlen(text), __VA_ARGS__))
    for (int i = 0; i < MAX_OBJECTS; i++) {
        if (memories[i].kind)
            LEAK("gpu%d, %zu bytes\n", memories[i].id, memories[i].nbytes);
        if (allocations[i].live)
            LEAK("allocation handle of %zu bytes\n", allocations[i].nbytes);
        if (reservations[i].live)
            LEAK("addresses of %zu bytes\n", reservations[i].nbytes);
        if (pins[i].nbytes)
            LEAK("pin%d, %zu bytes\n", pins[i].id, pins[i].nbytes);
    }
    return count;
}

void end_memory(void)
{
    lock();
    for (int i = 0; i < MAX_OBJECTS; i++) {
        if (memories[i].kind)
            munmap((void *)memories[i].base, memories[i].nbytes);
        if (memories[i].kind == PLAIN)
            close(memories[i].fd);
        if (allocations[i].live)
            close(allocations[i].fd);
        memories[i].kind = FREE;
        allocations[i].live = reservations[i].live = 0;
        pins[i].nbytes = 0;
    }
    unlock();
}

static Memory *new_memory(int kind, uint64_t base, size_t nbytes, int fd)
{
    for (int i = 0; i < MAX_OBJECTS; i++)
        if (!memories[i].kind) {
            memories[i] = (Memory){kind, ++num_memories, current_device(), fd, 1, 0, base, nbytes, {{0}}, 0};
            top_memory = i < top_memory ? top_memory : i + 1;
            return &memories[i];
        }
    return NULL;
}

static uint64_t map_fd(int fd, size_t nbytes)
{
    void *at = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return at == MAP_FAILED ? 0 : (uint64_t)at;
}

static int new_fd(const char *name, size_t nbytes)
{
    int fd = memfd_create(name, MFD_CLOEXEC);
    return fd >= 0 && ftruncate(fd, (off_t)nbytes) == 0 ? fd : -1;
}

/* ---- plain memory ------------------------------------------------------------------------------------------- */

CUresult cuMemGetInfo_v2(size_t *unused, size_t *total)
{
    *total = 8ull << 30;
    *unused = 7ull << 30;
    return enter("cuMemGetInfo_v2", 1);
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t nbytes)
{
    CUresult result = enter("cuMemAlloc_v2", 1);
    if (result)
        return result;
    if (!nbytes)
        return violation(INVALID_VALUE, "cuMemAlloc_v2 of no bytes");
    int fd = new_fd("stubcuda-plain", nbytes);
    uint64_t base = fd < 0 ? 0 : map_fd(fd, nbytes);
    if (!base)
        return OUT_OF_MEMORY;
    lock();
    Memory *memory = new_memory(PLAIN, base, nbytes, fd);
    unlock();
    *address = base;
    note("cuMemAlloc_v2 %zu -> gpu%d", nbytes, memory->id);
    return OK;
}

CUresult cuMemFree_v2(CUdeviceptr address)
{
    CUresult result = enter("cuMemFree_v2", 1);
    if (result)
        return result;
    lock();
    Memory *memory = memory_at(address);
    int known = memory && memory->kind == PLAIN && memory->base == address;
    if (known) {
        munmap((void *)memory->base, memory->nbytes);
        close(memory->fd);
        memory->kind = FREE;
    }
    unlock();
    note("cuMemFree_v2");
    return known ? OK : violation(INVALID_VALUE, "cuMemFree_v2 of what is no allocation's beginning");
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *nbytes, CUdeviceptr address)
{
    CUresult result = enter("cuMemGetAddressRange_v2", 1);
    if (result)
        return result;
    Memory *memory = memory_at(address);
    if (!memory)
        return NOT_FOUND;
    *base = memory->base;
    *nbytes = memory->nbytes;
    note("cuMemGetAddressRange_v2 %s -> %zu", where(address), memory->nbytes);
    return OK;
}

CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address)
{
    CUresult result = enter("cuPointerGetAttribute", 1);
    if (result)
        return result;
    Memory *memory = memory_at(address);
    if (!memory)
        return INVALID_VALUE;
    Allocation *behind = memory->kind == MAPPED ? &allocations[memory->handle - 1000] : NULL;
    note("cuPointerGetAttribute %d of %s", attribute, where(address));
    switch (attribute) {
    case 2: *(unsigned *)data = 2; return OK;
    case 9: *(int *)data = memory->device; return OK;
    case 10: *(unsigned char *)data = memory->kind == PLAIN; return OK; /* a bool: one byte is written */
    case 14: *(uint64_t *)data = behind && behind->exportable; return OK;
    default: return violation(INVALID_VALUE, "pointer attribute %d is none that the stub knows", attribute);
    }
}

/* ---- legacy handles ----------------------------------------------------------------------------------------- */

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
    CUresult result = enter("cuIpcGetMemHandle", 1);
    struct stat info;
    if (result)
        return result;
    Memory *memory = memory_at(address);
    if (!memory || memory->kind != PLAIN)
        return INVALID_VALUE;
    fstat(memory->fd, &info);
    Blob blob = {"stubipc", (int)getpid(), memory->fd, memory->device, 0, memory->nbytes, info.st_ino, {0}};
    memcpy(handle, &blob, sizeof blob);
    note("cuIpcGetMemHandle gpu%d", memory->id);
    return OK;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
    CUresult result = enter("cuIpcOpenMemHandle_v2", 1);
    char path[64];
    struct stat info;
    Blob blob;
    if (result)
        return result;
    memcpy(&blob, &handle, sizeof blob);
    if (flags != 1)
        return violation(INVALID_VALUE, "cuIpcOpenMemHandle_v2 with flags %u", flags);
    if (memcmp(blob.magic, "stubipc", 8))
        return INVALID_HANDLE;
    if (blob.pid == getpid())
        return INVALID_CONTEXT;
    lock();
    for (int i = 0; i < MAX_OBJECTS; i++)
        if (memories[i].kind == OPENED && !memcmp(&memories[i].blob, &handle, sizeof handle)) {
            memories[i].users++;
            *address = memories[i].base;
            unlock();
            note("cuIpcOpenMemHandle_v2 flags 1 -> gpu%d, opened %d times", memories[i].id, memories[i].users);
            return OK;
        }
    unlock();
    snprintf(path, sizeof path, "/proc/%d/fd/%d", blob.pid, blob.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return INVALID_VALUE; /* its process is gone, or not to be seen from here */
    if (fstat(fd, &info) || info.st_ino != blob.inode) {
        close(fd);
        return INVALID_VALUE; /* freed since */
    }
    uint64_t base = map_fd(fd, blob.nbytes);
    close(fd);
    if (!base)
        return MAP_FAILED_;
    lock();
    Memory *memory = new_memory(OPENED, base, blob.nbytes, -1);
    memory->blob = handle;
    unlock();
    *address = base;
    note("cuIpcOpenMemHandle_v2 flags 1 -> gpu%d", memory->id);
    return OK;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address)
{
    CUresult result = enter("cuIpcCloseMemHandle", 1);
    if (result)
        return result;
    lock();
    Memory *memory = memory_at(address);
    int known = memory && memory->kind == OPENED && memory->base == address;
    int id = memory ? memory->id : 0;
    if (known && !--memory->users) {
        munmap((void *)memory->base, memory->nbytes);
        memory->kind = FREE;
    }
    unlock();
    note("cuIpcCloseMemHandle gpu%d", id);
    return known ? OK : violation(INVALID_VALUE, "cuIpcCloseMemHandle of what was not opened");
}

/* ---- allocation handles -------------------------------------------------------------------------------------- */

static Allocation *behind(CUhandle handle, const char *name)
{
    if (handle >= 1000 && handle < 1000 + MAX_OBJECTS && allocations[handle - 1000].live)
        return &allocations[handle - 1000];
    violation(INVALID_VALUE, "%s of a handle that is none", name);
    return NULL;
}

static void unuse(Allocation *allocation) /* with the lock: nobody holds or maps it any more */
{
    if (!allocation->users) {
        close(allocation->fd);
        allocation->live = 0;
    }
}

static CUhandle new_allocation(Allocation made)
{
    for (int i = 0; i < MAX_OBJECTS; i++)
        if (!allocations[i].live) {
            allocations[i] = made;
            return (CUhandle)i + 1000;
        }
    return 0;
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
    CUresult result = enter("cuMemGetAllocationGranularity", 0);
    *nbytes = GRAIN;
    if (!result && option)
        result = violation(INVALID_VALUE, "granularity %d", option);
    return result ? result : check_prop(prop);
}

CUresult cuMemCreate(CUhandle *handle, size_t nbytes, const CUmemAllocationProp *prop, unsigned long long flags)
{
    CUresult result = enter("cuMemCreate", 0);
    if (!result)
        result = check_prop(prop);
    if (result)
        return result;
    if (flags || !nbytes || nbytes % GRAIN)
        return violation(INVALID_VALUE, "cuMemCreate of %zu bytes, flags %llu", nbytes, flags);
    Allocation made = {1, prop->location.id, new_fd("stubcuda-vmm", nbytes), prop->requestedHandleTypes & 1, 1, nbytes};
    lock();
    *handle = new_allocation(made);
    unlock();
    note("cuMemCreate %zu handle types %d", nbytes, prop->requestedHandleTypes);
    return OK;
}

CUresult cuMemRelease(CUhandle handle)
{
    CUresult result = enter("cuMemRelease", 0);
    Allocation *allocation = result ? NULL : behind(handle, "cuMemRelease");
    if (!allocation)
        return result ? result : INVALID_VALUE;
    lock();
    allocation->users--;
    unuse(allocation);
    unlock();
    note("cuMemRelease");
    return OK;
}

CUresult cuMemRetainAllocationHandle(CUhandle *handle, void *address)
{
    CUresult result = enter("cuMemRetainAllocationHandle", 0);
    Memory *memory = memory_at((uint64_t)address);
    if (result)
        return result;
    if (!memory || memory->kind != MAPPED)
        return INVALID_VALUE;
    *handle = memory->handle;
    lock();
    allocations[*handle - 1000].users++;
    unlock();
    note("cuMemRetainAllocationHandle of %s", where((uint64_t)address));
    return OK;
}

CUresult cuMemExportToShareableHandle(void *to, CUhandle handle, int type, unsigned long long flags)
{
    CUresult result = enter("cuMemExportToShareableHandle", 0);
    Allocation *allocation = result ? NULL : behind(handle, "cuMemExportToShareableHandle");
    if (!allocation)
        return result ? result : INVALID_VALUE;
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
    CUresult result = enter("cuMemImportFromShareableHandle", 0);
    char path[64], target[128] = "";
    struct stat info;
    if (result)
        return result;
    if (type != 1 || (uint64_t)from > 1 << 20)
        return violation(INVALID_VALUE, "import of %p as type %d: a descriptor goes by value", from, type);
    snprintf(path, sizeof path, "/proc/self/fd/%d", (int)(uint64_t)from);
    if (readlink(path, target, sizeof target - 1) < 0 || !strstr(target, "stubcuda-vmm") || stat(path, &info))
        return INVALID_VALUE;
    int fd = fcntl((int)(uint64_t)from, F_DUPFD_CLOEXEC, 3);
    Allocation made = {1, current_device(), fd, 1, 1, (size_t)info.st_size};
    lock();
    *handle = new_allocation(made);
    unlock();
    note("cuMemImportFromShareableHandle type 1");
    return OK;
}

static Reservation *reservation_of(uint64_t base, size_t nbytes)
{
    for (int i = 0; i < MAX_OBJECTS; i++)
        if (reservations[i].live && reservations[i].base == base && reservations[i].nbytes == nbytes)
            return &reservations[i];
    return NULL;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t nbytes, size_t alignment, CUdeviceptr hint, unsigned long long flags)
{
    CUresult result = enter("cuMemAddressReserve", 0);
    if (result)
        return result;
    if (alignment || hint || flags || !nbytes || nbytes % GRAIN)
        return violation(INVALID_VALUE, "cuMemAddressReserve of %zu, %zu, %llu, %llu", nbytes, alignment,
                         (unsigned long long)hint, flags);
    void *at = mmap(NULL, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    lock();
    for (int i = 0; i < MAX_OBJECTS; i++)
        if (!reservations[i].live) {
            reservations[i] = (Reservation){(uint64_t)at, nbytes, 1, 0};
            break;
        }
    unlock();
    *address = (uint64_t)at;
    note("cuMemAddressReserve %zu", nbytes);
    return OK;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t nbytes)
{
    CUresult result = enter("cuMemAddressFree", 0);
    if (result)
        return result;
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
    CUresult result = enter("cuMemMap", 0);
    Allocation *allocation = result ? NULL : behind(handle, "cuMemMap");
    if (!allocation)
        return result ? result : INVALID_VALUE;
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
    CUresult result = enter("cuMemSetAccess", 0);
    if (result)
        return result;
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
    CUresult result = enter("cuMemUnmap", 0);
    if (result)
        return result;
    lock();
    Reservation *reservation = reservation_of(address, nbytes);
    Memory *memory = memory_at(address);
    int mapped = reservation && reservation->mapped && memory && memory->kind == MAPPED && memory->nbytes == nbytes;
    int id = memory ? memory->id : 0;
    if (mapped) {
        mmap((void *)address, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
        reservation->mapped = 0;
        memory->kind = FREE;
        allocations[memory->handle - 1000].users--;
        unuse(&allocations[memory->handle - 1000]);
    }
    unlock();
    note("cuMemUnmap gpu%d", id);
    return mapped ? OK : violation(INVALID_VALUE, "cuMemUnmap of what is not mapped so");
}

/* ---- host memory -------------------------------------------------------------------------------------------- */

static CUresult pin(const char *name, void *address, size_t nbytes, unsigned int flags)
{
    CUresult result = OK;
    uint64_t base = (uint64_t)address;
    Pin *pin = NULL;
    if (flags != 3 || !nbytes || nbytes > 1ull << 30)
        return violation(INVALID_VALUE, "%s of %zu bytes, flags %u", name, nbytes, flags);
    if (msync((void *)(base & ~4095ull), nbytes + (base & 4095), MS_ASYNC))
        return violation(INVALID_VALUE, "%s of memory that is not mapped", name);
    lock();
    for (int i = 0; i < MAX_OBJECTS; i++) {
        if (pins[i].nbytes && base < pins[i].base + pins[i].nbytes && pins[i].base < base + nbytes)
            result = ALREADY_REGISTERED;
        if (!pins[i].nbytes && !pin)
            pin = &pins[i];
    }
    if (!result) {
        *pin = (Pin){base, nbytes, ++num_pins};
        top_pin = pin - pins < top_pin ? top_pin : (int)(pin - pins) + 1;
    }
    unlock();
    note("%s %zu flags 3 -> pin%d", name, nbytes, result ? 0 : pin->id);
    return result;
}

static CUresult unpin(const char *name, void *address)
{
    int id = 0;
    lock();
    for (int i = 0; i < MAX_OBJECTS; i++)
        if (pins[i].nbytes && pins[i].base == (uint64_t)address) {
            id = pins[i].id;
            pins[i].nbytes = 0;
        }
    unlock();
    note("%s pin%d", name, id);
    return id ? OK : violation(NOT_REGISTERED, "%s of what is no registration's beginning", name);
}

CUresult cuMemHostRegister_v2(void *address, size_t nbytes, unsigned int flags)
{
    CUresult result = enter("cuMemHostRegister_v2", 1);
    return result ? result : pin("cuMemHostRegister_v2", address, nbytes, flags);
}

CUresult cuMemHostUnregister(void *address)
{
    CUresult result = enter("cuMemHostUnregister", 1);
    return result ? result : unpin("cuMemHostUnregister", address);
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *to, void *address, unsigned int flags)
{
    CUresult result = enter("cuMemHostGetDevicePointer_v2", 1);
    *to = (uint64_t)address - alias();
    if (result)
        return result;
    if (flags || !pin_at(*to))
        return violation(INVALID_VALUE, "cuMemHostGetDevicePointer_v2 of what is not registered, flags %u", flags);
    note("cuMemHostGetDevicePointer_v2 %s", where(*to));
    return OK;
}

CUresult cuMemHostAlloc(void **address, size_t nbytes, unsigned int flags)
{
    CUresult result = enter("cuMemHostAlloc", 1);
    if (result)
        return result;
    *address = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return pin("cuMemHostAlloc", *address, nbytes, flags);
}

CUresult cuMemFreeHost(void *address)
{
    CUresult result = enter("cuMemFreeHost", 1);
    size_t nbytes = 0;
    for (int i = 0; i < MAX_OBJECTS; i++)
        if (pins[i].base == (uint64_t)address)
            nbytes = pins[i].nbytes;
    if (!result)
        result = unpin("cuMemFreeHost", address);
    if (!result)
        munmap(address, nbytes);
    return result;
}
