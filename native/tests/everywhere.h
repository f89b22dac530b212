// Every backend that runs here, each with one thread and with several.
#pragma once

#include <string>
#include <vector>

#include "paceline.h"

namespace paceline::test {

inline std::vector<std::string> backend_names() {
    std::vector<std::string> names(1);
    for (const char* at = pl_backends(); *at != 0; ++at)
        if (*at == ',') names.emplace_back();
        else names.back() += *at;
    return names;
}

// f(what) for every backend and some numbers of threads.
template <class Function> void everywhere(const Function& f) {
    for (const std::string& name : backend_names())
        for (int threads : {1, 3}) {
            pl_use_backend(name.c_str());
            pl_set_threads(threads);
            f(name + ", threads " + std::to_string(threads));
        }
}

}  // namespace paceline::test
