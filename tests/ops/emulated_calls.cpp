// Calls functions of a library as it is asked to on its standard input: what a test of kernels for another processor runs under qemu.
//
// A call: 64 bytes of name, count of whole arguments, of floating-point ones; of each whole argument three words, then its bytes where they
// are sent: (bytes or -1, value, Way). Each floating-point argument is 8 bytes, a float in the lower ones. Answer: the result, then the bytes
// of what is read back. Arguments in memory end where a page begins that nobody may read, so that reading beyond them is a fault.

#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

enum Way { IN = 1, OUT = 2 };  // sent, read back; neither: room to work in
constexpr int64_t MOST = 24, PAGE = 65536;

void get(void* to, size_t bytes) {
    if (bytes && fread(to, bytes, 1, stdin) != 1) exit(feof(stdin) ? 0 : 3);
}

struct Held {
    char* pages = nullptr;
    char* at = nullptr;
    int64_t whole = 0, bytes = 0, way = 0;

    void take(int64_t of, int64_t how) {
        bytes = of, way = how, whole = (of + PAGE - 1) / PAGE * PAGE;
        pages = static_cast<char*>(mmap(nullptr, whole + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (pages == MAP_FAILED || mprotect(pages + whole, PAGE, PROT_NONE)) exit(4);
        at = pages + whole - bytes;
        if (way & IN) get(at, bytes);
        else memset(at, 0xff, bytes);  // NaN, and codes of -1
    }
    void give_back() const {
        if (!pages) return;
        if (way & OUT) fwrite(at, 1, bytes, stdout);
        munmap(pages, whole + PAGE);
    }
};

typedef int64_t Call(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                     int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, double, double,
                     double, double, double, double, double, double);

}  // namespace

int main(int, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    for (;;) {
        char name[64];
        int64_t counts[2], a[MOST] = {};
        double f[8] = {};
        get(name, sizeof name);
        get(counts, sizeof counts);
        Held held[MOST];
        for (int64_t i = 0; i < counts[0]; i++) {
            int64_t told[3];
            get(told, sizeof told);
            if (told[0] < 0) {
                a[i] = told[1];
            } else {
                held[i].take(told[0], told[2]);
                a[i] = reinterpret_cast<int64_t>(held[i].at);
            }
        }
        get(f, 8 * counts[1]);
        // of the Procedure Call Standard for Arm: whole and floating-point arguments are counted apart, and those that a function does not
        // take do it no harm
        Call* call = reinterpret_cast<Call*>(dlsym(library, name));
        if (!call) return 5;
        const int64_t result = call(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16],
                                    a[17], a[18], a[19], a[20], a[21], a[22], a[23], f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7]);
        fwrite(&result, sizeof result, 1, stdout);
        for (int64_t i = 0; i < counts[0]; i++) held[i].give_back();
        fflush(stdout);
    }
}
