/* A CUDA driver without a GPU: the entry points that kvferry calls, over host memory and memfds.
 *
 * It is strict where the real one is silent: what a driver would take for granted, crash on or answer with garbage
 * is written down as a VIOLATION and fails the test. Three things can be done to it:
 *
 *   control   lines in the file that $STUBCUDA_CONTROL names, or stub_control(text); read anew when they change
 *               NAME fail CODE [after N] [times M]     the call fails so
 *               NAME delay MS  [after N] [times M]     the call takes so long
 *               NAME hang      [after N] [times M]     the call does not return until the line is gone
 *               NAME is an entry point, or `copy`: the GPU's own work, on the stream's thread
 *               attr NUMBER VALUE     what a device attribute is      driver VERSION     devices COUNT
 *               pageable 1            host memory that is not registered may be copied to and from
 *   journal   each call with its arguments, one file a process: $STUBCUDA_JOURNAL.<pid>, or stub_journal(path)
 *   questions stub_violations(), stub_leaks(text, size), stub_sizeof(name), stub_reset(), stub_end_process()
 */
#ifndef STUB_H
#define STUB_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef void *CUcontext;
typedef void *CUstream;
typedef void *CUevent;
typedef unsigned long long CUhandle; /* CUmemGenericAllocationHandle */

typedef struct { char bytes[16]; } CUuuid;
typedef struct { char reserved[64]; } CUipcMemHandle;
typedef struct { int type; int id; } CUmemLocation;
typedef struct {
    int type;
    int requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType, gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;
typedef struct {
    int srcAccessOrder;
    CUmemLocation srcLocHint, dstLocHint;
    unsigned int flags;
} CUmemcpyAttributes;

enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, NO_DEVICE = 100,
    INVALID_CONTEXT = 201, MAP_FAILED_ = 205, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
    ILLEGAL_ADDRESS = 700, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, NOT_SUPPORTED = 801
};

#define MAX_OBJECTS 4096
#define ALIAS (1ull << 46) /* between a host address and the device's, where attribute 91 is 0 */

/* core.c */
CUresult enter(const char *name, int needs_context); /* what control says; OK: go on */
CUresult gpu_work(void);                              /* the same for `copy` */
void note(const char *format, ...);
CUresult violation(CUresult result, const char *format, ...);
long setting(const char *kind, long number, long otherwise);
int current_device(void);
extern int stub_sticky; /* the result of every call from now on; 0: none */

/* memory.c: device memory, and the handles of it */
int device_range(uint64_t address, size_t nbytes);     /* whether it lies in one live device allocation */

/* host.c: registered host memory */
const char *where(uint64_t address);                   /* `gpu1+0x40` or `pin2+0x0`; of this thread until its 8th call */
void *pinned_range(uint64_t address, size_t nbytes);   /* the host address, if it lies in one registration */

/* Of each room: writes what is still there, one a line, and how much that is; lets go of all of it. */
size_t memory_leaks(char *text, size_t size);
size_t mapped_leaks(char *text, size_t size);
size_t host_leaks(char *text, size_t size);
size_t copy_leaks(char *text, size_t size);
void end_memory(void);
void end_mapped(void);
void end_host(void);
void end_copies(void);

/* The lock of all tables; never held while a call hangs. */
void lock(void);
void unlock(void);

/* ---- what every room writes often -------------------------------------------------------------------------------- */

/* The first line of an entry point: it ends as control says of its name. */
#define ENTER(needs_context)                           \
    do {                                               \
        CUresult said_ = enter(__func__, needs_context); \
        if (said_)                                     \
            return said_;                              \
    } while (0)

/* The first of a table's `count` entries of which `condition` holds, called `e` in it; NULL: of none. */
#define FIND(table, count, condition)                                            \
    ({                                                                           \
        __typeof__(&(table)[0]) e, found_ = NULL;                                \
        for (e = (table); !found_ && e < (table) + (count); e++)                 \
            if (condition)                                                       \
                found_ = e;                                                      \
        found_;                                                                  \
    })

/* One line of a room's leaks; `text`, `size` and `count` are the function's. */
#define LEAK(...) (count++, snprintf(text + strlen(text), size - strlen(text), __VA_ARGS__))

#endif
