/* Device memory (memfds): whole allocations, what is asked about them, and legacy handles of them; see stub.h. */
#define _GNU_SOURCE
#include "memory.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct { /* the 64 bytes of an exported handle */
    char magic[8];
    int pid, fd, device, pad;
    uint64_t nbytes, inode;
    char rest[24];
} Blob;

static Memory memories[MAX_OBJECTS];
static int num_memories;
static int top_memory; /* no entry at or above was ever used: lookups are many, objects few */
_Static_assert(sizeof(Blob) == sizeof(CUipcMemHandle), "a handle has 64 bytes");

/* With or without the lock: entries are written before they count. */
Memory *memory_at(uint64_t address)
{
    return FIND(memories, top_memory, e->kind && address >= e->base && address < e->base + e->nbytes);
}

int device_range(uint64_t address, size_t nbytes)
{
    Memory *memory = memory_at(address);
    return memory && address + nbytes <= memory->base + memory->nbytes && (memory->kind != MAPPED || memory->allowed);
}

size_t memory_leaks(char *text, size_t size)
{
    size_t count = 0;
    *text = 0;
    for (Memory *memory = memories; memory < memories + top_memory; memory++)
        if (memory->kind)
            LEAK("gpu%d, %zu bytes\n", memory->id, memory->nbytes);
    return count;
}

void end_memory(void)
{
    lock();
    for (Memory *memory = memories; memory < memories + top_memory; memory++) {
        if (memory->kind)
            munmap((void *)memory->base, memory->nbytes);
        if (memory->kind == PLAIN)
            close(memory->fd);
        memory->kind = FREE;
    }
    unlock();
}

Memory *new_memory(int kind, uint64_t base, size_t nbytes, int fd)
{
    Memory *memory = FIND(memories, MAX_OBJECTS, !e->kind);
    *memory = (Memory){kind, ++num_memories, current_device(), fd, 1, 0, base, nbytes, {{0}}, 0};
    if (memory - memories >= top_memory)
        top_memory = (int)(memory - memories) + 1;
    return memory;
}

static uint64_t map_fd(int fd, size_t nbytes)
{
    void *at = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return at == MAP_FAILED ? 0 : (uint64_t)at;
}

int new_fd(const char *name, size_t nbytes)
{
    int fd = memfd_create(name, MFD_CLOEXEC);
    return fd >= 0 && ftruncate(fd, (off_t)nbytes) == 0 ? fd : -1;
}

/* ---- plain memory ------------------------------------------------------------------------------------------- */

CUresult cuMemGetInfo_v2(size_t *unused, size_t *total)
{
    ENTER(1);
    *total = 8ull << 30;
    *unused = 7ull << 30;
    return OK;
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t nbytes)
{
    ENTER(1);
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
    ENTER(1);
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
    ENTER(1);
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
    ENTER(1);
    Memory *memory = memory_at(address);
    if (!memory)
        return INVALID_VALUE;
    note("cuPointerGetAttribute %d of %s", attribute, where(address));
    switch (attribute) {
    case 2: *(unsigned *)data = 2; return OK;
    case 9: *(int *)data = memory->device; return OK;
    case 10: *(unsigned char *)data = memory->kind == PLAIN; return OK; /* a bool: one byte is written */
    case 14: *(uint64_t *)data = is_exportable(memory); return OK;
    default: return violation(INVALID_VALUE, "pointer attribute %d is none that the stub knows", attribute);
    }
}

/* ---- legacy handles ----------------------------------------------------------------------------------------- */

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
    ENTER(1);
    struct stat info;
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
    ENTER(1);
    char path[64];
    struct stat info;
    Blob blob;
    memcpy(&blob, &handle, sizeof blob);
    if (flags != 1)
        return violation(INVALID_VALUE, "cuIpcOpenMemHandle_v2 with flags %u", flags);
    if (memcmp(blob.magic, "stubipc", 8))
        return INVALID_HANDLE;
    if (blob.pid == getpid())
        return INVALID_CONTEXT;
    lock();
    Memory *memory = FIND(memories, top_memory, e->kind == OPENED && !memcmp(&e->blob, &handle, sizeof handle));
    if (memory)
        memory->users++;
    unlock();
    if (memory) {
        *address = memory->base;
        note("cuIpcOpenMemHandle_v2 flags 1 -> gpu%d, opened %d times", memory->id, memory->users);
        return OK;
    }
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
    memory = new_memory(OPENED, base, blob.nbytes, -1);
    memory->blob = handle;
    unlock();
    *address = base;
    note("cuIpcOpenMemHandle_v2 flags 1 -> gpu%d", memory->id);
    return OK;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address)
{
    ENTER(1);
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
